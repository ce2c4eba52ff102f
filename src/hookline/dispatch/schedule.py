"""When a registered hook is due. The schedule belongs to the registration, not to the hook."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """Which steps a hook sees. It sees a step whole: every event of it, or none.

    Args:
        every: the hook sees each N-th step: steps N, 2N, 3N, …
        sample_rate: and of these a share, chosen by the step's number and the hook's name, so
            that it is the same on every rank and after a resume, and draws from no generator.
        from_epoch: and only from this epoch on, counted from 0.
    """

    every: int = 1
    sample_rate: float = 1.0
    from_epoch: int = 0

    def __post_init__(self) -> None:
        _check_int("every", self.every, 1)
        _check_int("from_epoch", self.from_epoch, 0)
        rate = self.sample_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise ValueError(
                f"sample_rate is {rate!r}; expected a share above 0 and up to 1, such as 0.1. "
                "To switch a hook off, use enabled=False."
            )

    def __str__(self) -> str:
        parts = [f"every {self.every}"] if self.every > 1 else []
        parts += [f"sample {self.sample_rate:g}"] if self.sample_rate < 1 else []
        parts += [f"from epoch {self.from_epoch}"] if self.from_epoch else []
        return ", ".join(parts) or "always"

    def samples(self, name: str, step: int) -> bool:
        """Whether the sampling chooses this step for the hook of this name."""
        return zlib.crc32(f"{name}:{step}".encode()) < self.sample_rate * 2**32


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        shown = "nan" if isinstance(value, float) and math.isnan(value) else repr(value)
        raise ValueError(f"{name} is {shown}; expected a whole number of at least {least}.")
