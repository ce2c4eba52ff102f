"""Updates without state. They change the gradients in place."""

# pyright: reportPrivateImportUsage=false
# The names of torch's foreach kernels, which its optimizers also use, begin with an underscore.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import PositiveFloat

from hookline.errors import LoopError
from hookline.hook import UpdateHook
from hookline.options import BuiltIn
from hookline.tensors.norms import all_finite, global_norm
from hookline.tensors.parameter_names import match_parameters
from hookline.updates.gradients import require_dense

_MAX_CACHED = 64  # optimizers times patterns; parameters may change during training


class _PatternUpdate(BuiltIn, UpdateHook):
    """An update of the parameters that match patterns."""

    def _select(
        self, gradients: Mapping[str, torch.Tensor], patterns: Sequence[str], model: torch.nn.Module
    ) -> list[torch.Tensor]:
        """Return the gradients that match; raise if a pattern matches no parameter."""
        if not patterns:
            return []
        cache: dict[Any, list[str]] = self.__dict__.setdefault("_cache", {})
        key = (id(model), *patterns, *gradients)
        if key not in cache:
            if len(cache) >= _MAX_CACHED:
                cache.clear()
            names = match_parameters(model, patterns, others=gradients)
            cache[key] = [name for name in gradients if name in names]
        return [gradients[name] for name in cache[key]]


class Identity(BuiltIn, UpdateHook):
    """Passes gradients through unchanged. Every trainer has it."""

    hookline_no_op = True
    cost = "Nothing is copied or computed."

    def __call__(self, *gradients: Mapping[str, torch.Tensor]) -> None:
        """Do nothing."""


class Scale(_PatternUpdate):
    """Multiplies gradients by a factor.

    Args:
        factor: the factor for all gradients, or factors by pattern: a substring of parameter
            names, a glob or a regular expression. If several match, all factors apply.
    """

    cost = "One multiplication of the gradients."

    def __init__(self, factor: float | dict[str, float]) -> None:
        self.factor = factor

    def __call__(self, gradients: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
        """Multiply the gradients."""
        if not isinstance(self.factor, dict):
            if gradients:
                torch._foreach_mul_(list(gradients.values()), self.factor)
            return
        for pattern, factor in self.factor.items():
            if selected := self._select(gradients, [pattern], model):
                torch._foreach_mul_(selected, factor)


class Mask(_PatternUpdate):
    """Sets the gradients of some parameters to zero.

    An optimizer with weight decay or momentum may still change these parameters. To freeze them
    completely, do not pass them to the optimizer.

    Args:
        patterns: substrings of parameter names, globs or regular expressions.
    """

    cost = "The selected gradients are filled with zeros."

    def __init__(self, patterns: list[str]) -> None:
        self.patterns = patterns

    def __call__(self, gradients: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
        """Zero the matching gradients."""
        if selected := self._select(gradients, self.patterns, model):
            torch._foreach_zero_(selected)


class ClipNorm(BuiltIn, UpdateHook):
    """Scales the gradients of an optimizer down if their total norm is above a limit.

    Args:
        max_norm: the largest total norm.
    """

    cost = "One norm and one multiplication of the gradients; nothing waits for the device."

    def __init__(self, max_norm: PositiveFloat) -> None:
        self.max_norm = max_norm

    def __call__(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Clip the total norm."""
        tensors = require_dense(gradients, self)
        if not tensors:
            return
        norm = global_norm(tensors)
        torch._foreach_mul_(tensors, (self.max_norm / (norm + 1e-6)).clamp(max=1.0))


class ClipValue(BuiltIn, UpdateHook):
    """Clamps each element of the gradients.

    Args:
        max_value: the largest absolute value.
    """

    cost = "Two comparisons of the gradients."

    def __init__(self, max_value: PositiveFloat) -> None:
        self.max_value = max_value

    def __call__(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Clamp the gradients."""
        if tensors := require_dense(gradients, self):
            torch._foreach_clamp_min_(tensors, -self.max_value)
            torch._foreach_clamp_max_(tensors, self.max_value)


class Centralize(BuiltIn, UpdateHook):
    """Gradient centralization: subtracts the mean from the gradient of each unit.

    Vectors, such as biases, are not changed (Yong et al., 2020, "Gradient centralization").
    """

    cost = "One mean and one subtraction of the gradients."

    def __call__(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Subtract the means."""
        tensors = [gradient for gradient in require_dense(gradients, self) if gradient.ndim > 1]
        means = [tensor.mean(dim=tuple(range(1, tensor.ndim)), keepdim=True) for tensor in tensors]
        if tensors:
            torch._foreach_sub_(tensors, means)


class SkipNonfinite(BuiltIn, UpdateHook):
    """Skips an optimizer's step if one of its gradients has a NaN or an infinity.

    Parameters, momentum and schedulers are not changed, and `on_step_skipped` is called. In a bare
    loop the scheduler is up to the loop.
    """

    cost = "One norm of the gradients; it waits for the device in every step."

    def __call__(
        self, gradients: Mapping[str, torch.Tensor], trainer: Any, optimizer_idx: int
    ) -> None:
        """Check the gradients, and request that the step be skipped."""
        if all_finite(require_dense(gradients, self), on_all_ranks=True):
            return
        skip = getattr(trainer, "skip_optimizer_step", None)
        if skip is None:
            raise LoopError(
                "SkipNonfinite found non-finite gradients, but this loop does not support skipping "
                "a step. Use Hookline's trainer, or check the gradients in the loop."
            )
        skip(optimizer_idx, "non-finite gradients")
