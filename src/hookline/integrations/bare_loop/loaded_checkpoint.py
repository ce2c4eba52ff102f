"""LoadedCheckpoint: where a bare loop continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hookline.loop.random_state import restore_random_state


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was loaded into a bare loop, which continues its data from here.

    Attributes:
        path: the checkpoint.
        step: completed steps.
        epoch: the epoch in progress, or the next one after the end of an epoch; None if the loop
            did not provide epochs.
        extra: what the loop gave to `save_checkpoint(extra=…)`.
    """

    path: Path
    step: int
    epoch: int | None
    extra: dict[str, Any]
    _random: Mapping[str, Any] | None = field(repr=False)
    _device: torch.device = field(repr=False)

    def restore_random_state(self) -> None:
        """Restore the random states of Python, NumPy and torch once more.

        Loading has restored them. Call this before the next step if the loop draws random numbers
        to find its data again, such as by iterating over a shuffled loader. Of several processes,
        each has its own states if all of them have saved together. If rank 0 has saved alone, the
        others keep theirs.
        """
        if self._random is not None:
            restore_random_state(dict(self._random), self._device)
