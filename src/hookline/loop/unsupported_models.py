"""Models that no loop supports."""

from __future__ import annotations

import torch

from hookline.errors import TrainingError

__all__ = ["check_supported"]


def check_supported(model: torch.nn.Module) -> None:
    """Raise for an engine of DeepSpeed: it runs backward, clipping and steps by itself.

    Raises:
        TrainingError: the model is such an engine.
    """
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__):
        raise TrainingError(
            "The model is a DeepSpeedEngine, which is not supported: its backward and step hide "
            "the gradients and the optimizer steps that hooks are called for. Give the model "
            "itself, and train it with DDP or FSDP2 (strategy='ddp' or 'fsdp')."
        )
