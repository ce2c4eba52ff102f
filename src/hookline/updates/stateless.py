"""Updates that need nothing but the gradients, and the parameters. They work in place."""

# pyright: reportPrivateImportUsage=false
# The foreach kernels of torch, which optimizers use too, have names with an underscore.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import PositiveFloat

from hookline.hook import Rank, UpdateHook
from hookline.options import BuiltIn
from hookline.tensors.parameter_names import matching, parameters_by_name
from hookline.tensors.sharded import whole
from hookline.updates.gradients import dense

__all__ = ["AGC", "Centralize", "ClipNorm", "ClipValue", "Identity", "Mask", "Scale"]

_KNOWN = 64  # optimizers times patterns; parameters may come and go while training


class _ByPattern(BuiltIn, UpdateHook):
    """An update that is told by patterns which parameters it is for."""

    def _chosen(
        self, gradients: Mapping[str, torch.Tensor], patterns: Sequence[str], model: torch.nn.Module
    ) -> list[torch.Tensor]:
        """The gradients that match; a pattern has to match some parameter."""
        if not patterns:
            return []
        known: dict[Any, list[str]] = self.__dict__.setdefault("_known", {})
        key = (id(model), *patterns, *gradients)
        if key not in known:
            if len(known) >= _KNOWN:
                known.clear()
            chosen = matching(model, patterns, others=gradients)
            known[key] = [name for name in gradients if name in chosen]
        return [gradients[name] for name in known[key]]


class Identity(BuiltIn, UpdateHook):
    """Passes gradients through as they are. Every trainer has it."""

    hookline_rank = Rank.DEFAULT
    hookline_no_op = True
    cost = "It copies nothing and computes nothing."

    def __call__(self, *gradients: Mapping[str, torch.Tensor]) -> None:
        """Do nothing."""


class Scale(_ByPattern):
    """Multiplies gradients by a factor.

    Args:
        factor: the factor for all gradients, or factors by pattern: a part of parameters' names, a
            glob or a regular expression. Where several match, all factors count.
    """

    cost = "One multiplication of the gradients."

    def __init__(self, factor: float | dict[str, float]) -> None:
        self.factor = factor

    def __call__(self, gradients: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
        """Multiply."""
        if not isinstance(self.factor, dict):
            if gradients:
                torch._foreach_mul_(list(gradients.values()), self.factor)
            return
        for pattern, factor in self.factor.items():
            if chosen := self._chosen(gradients, [pattern], model):
                torch._foreach_mul_(chosen, factor)


class Mask(_ByPattern):
    """Sets the gradients of some parameters to zero.

    An optimizer with weight decay or momentum may still move them: to freeze parameters for good,
    leave them out of the optimizer.

    Args:
        patterns: which: parts of parameters' names, globs or regular expressions.
    """

    cost = "Some gradients are filled with zeros."

    def __init__(self, patterns: list[str]) -> None:
        self.patterns = patterns

    def __call__(self, gradients: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
        """Set them to zero."""
        if chosen := self._chosen(gradients, self.patterns, model):
            torch._foreach_zero_(chosen)


class ClipNorm(BuiltIn, UpdateHook):
    """Scales the gradients of an optimizer down when their common norm is above a limit.

    Args:
        max_norm: the limit.
    """

    cost = "One norm and one multiplication of the gradients; nothing waits for the device."

    def __init__(self, max_norm: PositiveFloat) -> None:
        self.max_norm = max_norm

    def __call__(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Clip."""
        tensors = dense(gradients, self)
        if not tensors:
            return
        norm = whole(torch.nn.utils.get_total_norm(tensors))
        torch._foreach_mul_(tensors, (self.max_norm / (norm + 1e-6)).clamp(max=1.0))


class ClipValue(BuiltIn, UpdateHook):
    """Limits each number in the gradients.

    Args:
        max_value: the largest absolute value.
    """

    cost = "Two comparisons of the gradients."

    def __init__(self, max_value: PositiveFloat) -> None:
        self.max_value = max_value

    def __call__(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Clip."""
        if tensors := dense(gradients, self):
            torch._foreach_clamp_min_(tensors, -self.max_value)
            torch._foreach_clamp_max_(tensors, self.max_value)


class AGC(_ByPattern):
    """Adaptive gradient clipping: limits a unit's gradient to a share of its weights.

    A unit is a row of a matrix, a filter of a convolution, or a whole vector (Brock et al., 2021,
    "High-performance large-scale image recognition without normalization").

    Args:
        clipping: the largest ratio of a unit's gradient norm to its weight norm.
        eps: weight norms below this count as this, so that units at zero can move.
        skip: parameters that are left alone, such as the last layer: parts of names, globs or
            regular expressions.
    """

    cost = "Norms of gradients and weights for each unit, and one multiplication."

    def __init__(
        self,
        clipping: PositiveFloat = 0.01,
        eps: PositiveFloat = 1e-3,
        skip: list[str] | None = None,
    ) -> None:
        self.clipping = clipping
        self.eps = eps
        self.skip = skip

    def __call__(self, gradients: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
        """Clip each unit."""
        dense(gradients, self)
        left = {id(gradient) for gradient in self._chosen(gradients, self.skip or [], model)}
        weights = getattr(gradients, "parameters", None) or parameters_by_name(model)
        pairs = [(weights[name], g) for name, g in gradients.items() if id(g) not in left]
        if not pairs:
            return
        limits = [_unit_norm(weight.detach()) for weight, _ in pairs]
        torch._foreach_clamp_min_(limits, self.eps)
        torch._foreach_mul_(limits, self.clipping)
        norms = [_unit_norm(gradient) for _, gradient in pairs]
        torch._foreach_clamp_min_(norms, 1e-6)
        torch._foreach_div_(limits, norms)
        torch._foreach_clamp_max_(limits, 1.0)
        torch._foreach_mul_([gradient for _, gradient in pairs], limits)


class Centralize(BuiltIn, UpdateHook):
    """Gradient centralization: subtracts from each unit's gradient its mean.

    Vectors, such as biases, stay as they are (Yong et al., 2020, "Gradient centralization").
    """

    cost = "One mean and one subtraction of the gradients."

    def __call__(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Subtract."""
        tensors = [gradient for gradient in dense(gradients, self) if gradient.ndim > 1]
        means = [tensor.mean(dim=tuple(range(1, tensor.ndim)), keepdim=True) for tensor in tensors]
        if tensors:
            torch._foreach_sub_(tensors, means)


def _unit_norm(tensor: torch.Tensor) -> torch.Tensor:
    """The norm of each row or filter; of a vector, its own."""
    dims = tuple(range(1, tensor.ndim)) or None
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)
    return norm
