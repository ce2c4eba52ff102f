"""Names of metrics: a host's own, and the names under which hooks find them in every loop."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from hookline.arguments import is_number

__all__ = ["of_phase", "with_common_names"]

_PHASES = {"eval": "val", "val": "val", "valid": "val", "validation": "val", "train": "train"}
_NAME = re.compile(rf"({'|'.join(_PHASES)})[_/](.+)")


def with_common_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a host's metrics under their own names and as `val/<name>` and `train/<name>`.

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
    """Return a host's metrics, those whose names have no phase also under `<phase>/<name>`.

    >>> of_phase({"loss": 0.5, "val_loss": 0.7}, "train")
    {'loss': 0.5, 'train/loss': 0.5, 'val_loss': 0.7}
    """
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        found[name] = value
        if isinstance(name, str) and _NAME.fullmatch(name) is None:
            found[f"{phase}/{name}"] = value
    return found
