"""The trainer that runs on Hugging Face Accelerate."""

from __future__ import annotations

from hookline.trainer.trainer import Trainer

__all__ = ["AccelerateTrainer"]


class AccelerateTrainer(Trainer):
    """A `Trainer` whose strategy is "accelerate".

        accelerator = Accelerator(mixed_precision="bf16")
        trainer = AccelerateTrainer(config, model, optimizer, accelerator=accelerator)

    Without an Accelerator it makes one, as `accelerate launch` says. Hooks find it in
    `trainer.accelerator`.
    """

    _needs_accelerate = True
