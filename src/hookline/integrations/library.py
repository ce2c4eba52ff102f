"""The events that another library's trainer gives to hooks, where they fire, and its metrics.

The tables in the documentation are made from `Library`, and hooks that need what is missing are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hookline.arguments import is_number
from hookline.events import EVENTS

_PHASES = {"eval": "val", "val": "val", "valid": "val", "validation": "val", "train": "train"}
_NAME = re.compile(rf"({'|'.join(_PHASES)})[_/](.+)")

_STEP: Mapping[str, str] = {
    "on_before_forward": "the model's outermost call begins",
    "on_after_forward": "the model's outermost call has returned",
    "on_after_backward": "backward has ended",
    "on_gradients_ready": "before the first clip, or before `optimizer.step()`",
    "on_gradient_clip": "torch's clipping functions were called",
    "on_before_optimizer_step": "`optimizer.step()` begins",
    "on_after_optimizer_step": "`optimizer.step()` has ended",
    "on_step_skipped": "the scaler, or a hook, has skipped `optimizer.step()`",
    "on_step_end": "the last optimizer has stepped, before gradients are zeroed",
}
"""Where the events fire that PyTorch's own hooks show, in every library."""


@dataclass(frozen=True)
class Library:
    """Another library's trainer, as messages and the documentation describe it.

    Attributes:
        name: what messages call it.
        places: where each event fires, apart from those that PyTorch's hooks show.
        missing: events that it does not give, each with the reason.
        provided: what hooks may ask for (keys of `loop_checks.CALLS`).
        calls: what to do about what is missing, by the same keys.
    """

    name: str
    places: Mapping[str, str]
    missing: Mapping[str, str]
    provided: frozenset[str]
    calls: Mapping[str, str]

    def where(self, event: str) -> str | None:
        """Return where an event fires; None if the library does not give it."""
        if event in self.missing:
            return None
        return self.places.get(event) or _STEP[event]

    def rows(self) -> list[tuple[str, str | None]]:
        """Return all events, with where they fire."""
        return [(event, self.where(event)) for event in EVENTS]


def with_common_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a library's metrics under their own names and as `val/<name>` and `train/<name>`.

        >>> with_common_names({"eval_loss": 0.5, "epoch": 1.0})
        {'val/loss': 0.5, 'eval_loss': 0.5, 'epoch': 1.0}

    Values other than numbers are omitted.
    """
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        is_value = isinstance(value, torch.Tensor) and value.numel() == 1
        if not isinstance(name, str) or not (is_value or is_number(value)):
            continue
        if (match := _NAME.fullmatch(name)) is not None:
            found.setdefault(f"{_PHASES[match[1]]}/{match[2]}", value)
        found[name] = value
    return found


def of_phase(metrics: Mapping[str, Any], phase: str) -> dict[str, Any]:
    """Return a library's metrics, those whose names have no phase also under `<phase>/<name>`.

    >>> of_phase({"loss": 0.5, "val_loss": 0.7}, "train")
    {'loss': 0.5, 'train/loss': 0.5, 'val_loss': 0.7}
    """
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        found[name] = value
        if isinstance(name, str) and _NAME.fullmatch(name) is None:
            found[f"{phase}/{name}"] = value
    return found
