"""Gradient transforms, between backward and optimizer step.

`gradients` is what updates get, `shaping` has those that need nothing but the gradients, `stateful`
those that remember, `skipping` the one that leaves out a step. Names are loaded when first used: a
bare loop needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.updates.gradients import Gradients, NamedParameters
    from hookline.updates.shaping import (
        AGC,
        Centralize,
        ClipNorm,
        ClipValue,
        Identity,
        Mask,
        Scale,
    )
    from hookline.updates.skipping import SkipNonfinite
    from hookline.updates.stateful import EMAFilter, Noise

__all__ = [
    "AGC",
    "Centralize",
    "ClipNorm",
    "ClipValue",
    "EMAFilter",
    "Gradients",
    "Identity",
    "Mask",
    "NamedParameters",
    "Noise",
    "Scale",
    "SkipNonfinite",
]

_WHERE = {
    "Gradients": "gradients",
    "NamedParameters": "gradients",
    "SkipNonfinite": "skipping",
    "EMAFilter": "stateful",
    "Noise": "stateful",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hookline.updates' has no attribute {name!r}")
    value = getattr(import_module(f"hookline.updates.{_WHERE.get(name, 'shaping')}"), name)
    globals()[name] = value
    return value
