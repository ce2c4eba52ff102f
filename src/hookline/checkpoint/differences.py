"""Differences between the weights of a checkpoint and those of a model; nothing imports torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from hookline.errors import listed

MAX_SHOWN = 5  # of one kind; the others are counted

Weights = Mapping[str, Any]


def describe_mismatches(weights: Weights, expected: Weights) -> list[str]:
    """Return how the names and shapes of weights differ from a model's, in a few lines."""
    missing = [name for name in expected if name not in weights]
    unknown = [name for name in weights if name not in expected]
    lines = [
        f"{owner} lacks {listed(names, MAX_SHOWN)}"
        for owner, names in (("the checkpoint", missing), ("the model", unknown))
        if names
    ]
    shapes = [
        f"'{name}' is {shape_of(value)} in the checkpoint and {shape_of(expected[name])} here"
        for name, value in weights.items()
        if name in expected and shape_of(value) != shape_of(expected[name])
    ]
    return lines + limit_lines(shapes, "other shapes")


def describe_dtypes(weights: Weights, expected: Weights) -> list[str]:
    """Return which weights of the same name and shape have another dtype."""
    lines = [
        f"'{name}' is {value.dtype} in the checkpoint and {expected[name].dtype} here"
        for name, value in fitting_weights(weights, expected).items()
        if getattr(value, "dtype", None) != getattr(expected[name], "dtype", None)
    ]
    return limit_lines(lines, "other dtypes")


def fitting_weights(weights: Weights, expected: Weights) -> OrderedDict[str, Any]:
    """Return the weights that a model has, too, with the same shape; and modules' versions."""
    fitting = OrderedDict(
        (name, value)
        for name, value in weights.items()
        if name in expected and shape_of(value) == shape_of(expected[name])
    )
    if hasattr(weights, "_metadata"):
        fitting._metadata = weights._metadata  # type: ignore[attr-defined]
    return fitting


def shape_of(value: Any) -> Any:
    """Return the shape of a tensor, or that it is none."""
    return tuple(value.shape) if hasattr(value, "shape") else "not a tensor"


def limit_lines(lines: list[str], what: str) -> list[str]:
    """Return the first lines, and how many more there are."""
    if len(lines) <= MAX_SHOWN:
        return lines
    return [*lines[:MAX_SHOWN], f"and {len(lines) - MAX_SHOWN} {what}"]
