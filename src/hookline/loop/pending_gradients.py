"""Gradients that wait for an optimizer which steps less often than others, in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hookline.loop.event_context import parameters_of
from hookline.tensors.sharded import shard_like

Saved = Sequence[Sequence[Any] | None]
"""For each optimizer the gradients of its parameters, or None if they do not wait."""


def save_gradients(optimizers: Sequence[Any], waits: Sequence[bool]) -> list[list[Any] | None]:
    """Return the gradients of the optimizers for which they wait."""
    return [
        [parameter.grad for parameter in parameters_of(optimizer)] if is_waiting else None
        for optimizer, is_waiting in zip(optimizers, waits, strict=True)
    ]


def load_gradients(optimizers: Sequence[Any], saved: Saved) -> None:
    """Restore gradients that wait; those of other optimizers are left alone."""
    for optimizer, gradients in zip(optimizers, saved, strict=True):
        if gradients is not None:
            for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
                parameter.grad = None
                if gradient is not None:
                    parameter.grad = shard_like(gradient.to(parameter.device), parameter)


def compare_gradients(optimizers: Sequence[Any], saved: Saved) -> list[str]:
    """Return a line if gradients that wait for their optimizer are of other parameters."""
    if len(saved) == len(optimizers) and all(map(_have_shapes, saved, optimizers)):
        return []
    return ["the gradients of the step in progress are those of other parameters"]


def _have_shapes(gradients: Sequence[Any] | None, optimizer: Any) -> bool:
    if gradients is None:
        return True
    parameters = parameters_of(optimizer)
    return len(gradients) == len(parameters) and all(
        gradient is None or gradient.shape == parameter.shape
        for gradient, parameter in zip(gradients, parameters, strict=True)
    )
