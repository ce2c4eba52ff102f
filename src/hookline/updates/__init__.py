"""Gradient transforms, between backward and optimizer step.

`gradients` defines what updates get, `stateless` and `stateful` the built-in updates. Names are
loaded when first used, because a bare loop needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from hookline.updates.gradients import Gradients as Gradients
    from hookline.updates.gradients import NamedParameters as NamedParameters
    from hookline.updates.stateful import EMAFilter as EMAFilter
    from hookline.updates.stateful import Noise as Noise
    from hookline.updates.stateless import Centralize as Centralize
    from hookline.updates.stateless import ClipNorm as ClipNorm
    from hookline.updates.stateless import ClipValue as ClipValue
    from hookline.updates.stateless import Identity as Identity
    from hookline.updates.stateless import Mask as Mask
    from hookline.updates.stateless import Scale as Scale
    from hookline.updates.stateless import SkipNonfinite as SkipNonfinite

_MODULES = {
    "gradients": ("Gradients", "NamedParameters"),
    "stateful": ("EMAFilter", "Noise"),
    "stateless": (
        *("Centralize", "ClipNorm", "ClipValue"),
        *("Identity", "Mask", "Scale", "SkipNonfinite"),
    ),
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    *(name for names in _MODULES.values() for name in names)
]

__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
