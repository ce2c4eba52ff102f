"""Notices a loss that is not finite, one batch late, without waiting for the device."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["DeferredNanCheck"]


class DeferredNanCheck:
    """Looks at each loss when the next one is there.

    The loss is copied to the host while training goes on, and looked at when the copy has arrived;
    if it has not, it is looked at later still.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, Any, Any]] = []

    def look(self, loss: torch.Tensor, where: Any) -> tuple[float, Any] | None:
        """Take this loss for later; return an earlier one that was not finite, and where it was."""
        bad = self._arrived(everything=False)
        copied = loss.to("cpu", non_blocking=True)
        event = None
        if loss.device.type != "cpu":
            event = torch.Event(loss.device)
            event.record()
        self._waiting.append((copied, event, where))
        return bad

    def finish(self) -> tuple[float, Any] | None:
        """Look at all that is left; this waits for the device."""
        return self._arrived(everything=True)

    def _arrived(self, *, everything: bool) -> tuple[float, Any] | None:
        while self._waiting:
            loss, event, where = self._waiting[0]
            if event is not None and not event.query():
                if not everything:
                    return None
                event.synchronize()
            del self._waiting[0]
            value = loss.item()
            if not math.isfinite(value):
                return value, where
        return None
