"""The check for losses that are not finite, without waiting for the device."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal, NamedTuple

import torch

from hookline.errors import TrainingError

__all__ = ["BatchPlace", "LossCheck"]

log = logging.getLogger("hookline")


class BatchPlace(NamedTuple):
    """Where a batch was in the data."""

    epoch: int
    loader: str
    batch_idx: int

    def __str__(self) -> str:
        return f"It was in epoch {self.epoch}, loader '{self.loader}', batch {self.batch_idx}."


class LossCheck:
    """Checks losses as `on_nan` says.

    With "stop", a loss on a device is copied to the CPU while training continues and is checked
    when the copy has arrived, one batch later or later still.

    Args:
        on_nan: what happens with a loss that is not finite.
        deferred: whether reading a loss would wait for a device.
    """

    def __init__(self, on_nan: Literal["stop", "skip", "continue"], *, deferred: bool) -> None:
        self._on_nan = on_nan
        self._deferred = deferred
        self._copies: list[tuple[torch.Tensor, Any, BatchPlace]] = []

    def check(self, loss: Any, place: BatchPlace) -> str:
        """Raise for a loss that is not finite, or return why its step is skipped ("" if not)."""
        if self._on_nan == "skip":
            value = float(loss)  # waits for the device, as documented for this setting
            if not math.isfinite(value):
                log.warning("The loss is %s; the step is skipped. %s", value, place)
                return f"the loss is {value}"
        elif self._on_nan == "stop":
            if not self._deferred:
                _raise_if_not_finite(loss, place)
            else:
                self._check_copies(wait=False)
                self._copy(loss, place)
        return ""

    def finish(self) -> None:
        """Check all losses that are left; this waits for the device."""
        self._check_copies(wait=True)

    def _copy(self, loss: torch.Tensor, place: BatchPlace) -> None:
        copied = loss.to("cpu", non_blocking=True)
        event = None
        if loss.device.type != "cpu":
            event = torch.Event(loss.device)
            event.record()
        self._copies.append((copied, event, place))

    def _check_copies(self, *, wait: bool) -> None:
        while self._copies:
            loss, event, place = self._copies[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            del self._copies[0]
            _raise_if_not_finite(loss.item(), place)


def _raise_if_not_finite(loss: float, place: BatchPlace) -> None:
    if not math.isfinite(loss):
        raise TrainingError(
            f"The loss was {loss}. {place} To continue anyway, set on_nan='skip' or 'continue'."
        )
