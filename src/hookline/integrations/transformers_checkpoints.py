"""The checkpoints of a Hugging Face Trainer: hooks' state is added, complete ones are marked.

The trainer would delete old checkpoints (`save_total_limit`) before a new one has the hooks' state
and is marked as complete. So its limit is taken away meanwhile, and applied after that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from hookline.integrations.hosts import host_state
from hookline.integrations.hosts.host_session import HostSession

__all__ = ["SaveLimit", "checkpoint_folder", "resumed_folder", "save_sessions"]


class SaveLimit:
    """The trainer's `save_total_limit`, which can be taken away for some time."""

    def __init__(self) -> None:
        self._limit: int | None = None

    def take(self, args: TrainingArguments) -> None:
        """Let the trainer delete no checkpoints for now."""
        if args.save_total_limit is not None:
            self._limit, args.save_total_limit = args.save_total_limit, None

    def give_back(self, args: TrainingArguments) -> None:
        """Give the trainer its limit back, if it was taken."""
        if self._limit is not None:
            args.save_total_limit, self._limit = self._limit, None


def save_sessions(trainer: Trainer, sessions: Mapping[str, HostSession]) -> Path:
    """Save the state of all sessions, by folder, in the trainer's newest checkpoint, and mark it.

    Then older checkpoints are deleted. All ranks call this. It returns the checkpoint.
    """
    args, state = trainer.args, trainer.state
    folder = checkpoint_folder(args, state)
    trainer.accelerator.wait_for_everyone()  # every rank writes its random states
    if host_state.save(sessions, folder) and args.should_save:
        best, limit = state.best_model_checkpoint, args.save_total_limit
        rotate_checkpoints(str(args.output_dir), limit, best, use_mtime=True)
    return folder


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the checkpoint that the trainer saves at this step."""
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}")


def resumed_folder() -> Path | None:
    """Return the checkpoint that the running `Trainer.train` has loaded."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Trainer.train.__code__:
        frame = frame.f_back
    given = None if frame is None else frame.f_locals.get("resume_from_checkpoint")
    return Path(given) if isinstance(given, str | os.PathLike) else None
