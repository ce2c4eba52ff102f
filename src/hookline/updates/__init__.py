"""Gradient transforms, between backward and optimizer step.

`gradients` defines what updates get, `stateless` and `stateful` the built-in updates. Names are
loaded when first used, because a bare loop needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from hookline.updates.gradients import Gradients, NamedParameters
    from hookline.updates.stateful import EMAFilter, Noise
    from hookline.updates.stateless import (
        AGC,
        Centralize,
        ClipNorm,
        ClipValue,
        Identity,
        Mask,
        Scale,
        SkipNonfinite,
    )

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gradients": ("Gradients", "NamedParameters"),
        "stateless": (
            *("AGC", "Centralize", "ClipNorm", "ClipValue"),
            *("Identity", "Mask", "Scale", "SkipNonfinite"),
        ),
        "stateful": ("EMAFilter", "Noise"),
    },
)
