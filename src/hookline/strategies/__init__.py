"""Strategies: what the trainer needs from where it runs, and no more."""

from hookline.strategies.plain import Plain

__all__ = ["Plain"]
