"""Strategies: what the trainer needs from where it runs, and no more."""

from hookline.trainer.strategies.single_process import SingleProcess

__all__ = ["SingleProcess"]
