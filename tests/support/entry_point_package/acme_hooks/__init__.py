"""Hooks of Acme's."""

from __future__ import annotations

import torch

import hookline


class LossCeiling(hookline.Hook):
    """Stops training when the loss is above a ceiling.

    Args:
        ceiling: the largest loss with which training goes on.
    """

    hookline_cost = "One number per step."

    def __init__(self, ceiling: float = 100.0) -> None:
        self.ceiling = ceiling

    def on_step_end(self, trainer, loss):
        if loss > self.ceiling:
            trainer.stop(f"the loss is above {self.ceiling}")


class GradientSign(hookline.UpdateHook):
    """Keeps only the signs of gradients."""

    def __call__(self, gradients):
        return {name: torch.sign(gradient) for name, gradient in gradients.items()}
