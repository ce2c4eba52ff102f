"""Gradient transforms, between backward and optimizer step.

`gradients` is what updates get, `shaping` has those that need nothing but the gradients, `stateful`
those that remember, `skipping` the one that leaves out a step.
"""

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
