"""What a LightningModule logs: the values that are new to the run and to hooks.

A Lightning Trainer keeps the values of earlier batches beside those of this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hookline.integrations.hosts.host_metrics import with_common_names

__all__ = ["LoggedMetrics"]


class LoggedMetrics:
    """The metrics of a Lightning Trainer, as far as they are new."""

    def __init__(self) -> None:
        self._recorded: dict[str, Any] = {}  # what the run has already
        self._shown: dict[str, Any] = {}  # what hooks have had as metrics of batches
        self._before_validation: dict[str, Any] = {}

    def take_batch(self, trainer: Any) -> dict[str, Any]:
        """Return what the module has logged in this batch, under its own names."""
        return _take_new(trainer.callback_metrics, self._shown)

    def take_record(self, trainer: Any) -> dict[str, Any]:
        """Return what the module has logged since the last call.

        Reading it may be a collective: all processes do it, or none.
        """
        return _take_new(trainer.logged_metrics, self._recorded)

    def start_validation(self, trainer: Any) -> None:
        """Remember what was logged before a validation."""
        self._before_validation = dict(trainer.callback_metrics)

    def take_validation(self, trainer: Any) -> dict[str, Any]:
        """Return the metrics of the validation that has ended, also under the common names."""
        new = _new_values(trainer.callback_metrics, self._before_validation)
        self._before_validation = {}
        self._recorded |= new
        self._shown |= new
        return _validation_names(new)


def _take_new(values: Mapping[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are not known yet, and add them to those that are."""
    new = _new_values(values, known)
    known |= values
    return new


def _new_values(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in values.items() if not _is_same(v, known.get(name))}


def _is_same(value: Any, known: Any) -> bool:
    """Return whether two values are the same tensor; the trainer detaches it at each access."""
    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
        return value.data_ptr() == known.data_ptr()
    return value is known


def _validation_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a validation, those without a phase in their name as `val/…`, too."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        named = with_common_names({name: value})
        found |= named if len(named) != 1 or name.startswith("val/") else {f"val/{name}": value}
        found |= named
    return found
