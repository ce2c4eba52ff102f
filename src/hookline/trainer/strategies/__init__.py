"""Strategies: what the trainer needs from the place where it runs."""

from hookline.trainer.strategies.accelerators import choose_accelerate
from hookline.trainer.strategies.making import make_strategy
from hookline.trainer.strategies.single_process import SingleProcess, parameters_of

__all__ = ["SingleProcess", "choose_accelerate", "make_strategy", "parameters_of"]
