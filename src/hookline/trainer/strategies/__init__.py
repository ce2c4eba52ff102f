"""Strategies: what the trainer needs from the place where it runs."""

from hookline.trainer.strategies.single_process import SingleProcess, parameters_of

__all__ = ["SingleProcess", "parameters_of"]
