"""What a debug probe looks for, and how it is measured without waiting for the device.

Whether values are finite, large or all zero follows from the smallest and the largest one. These
are computed where the tensor is, in one pass, and stay there; many are read at once. On a CPU that
is nine times as fast as `isfinite().all()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.errors import ConfigError, listed, nearest
from hookline.hook import Hook
from hookline.tensors.observation import Observation
from hookline.tensors.sharded import local

__all__ = ["Condition", "Conditions", "extremes", "read", "read_conditions"]

Conditions: TypeAlias = Any
"""`"nonfinite"`, `"dead"`, `{"magnitude": 1e4}`, a function of a tensor, or a list of these."""

_NAMES = ("nonfinite", "magnitude", "dead")


@dataclass(frozen=True)
class Condition:
    """One thing to look for. It has either `holds` or `function`.

    Args:
        name: As messages have it.
        holds: Whether it is so, by the smallest and the largest value.
        function: A user's: whether it is so, by the tensor; says so by a bool or a tensor.
        beside_nan: Whether it needs to know what there is beside a NaN.
    """

    name: str
    holds: Callable[[float, float], bool] | None = None
    function: Callable[[Tensor], Any] | None = None
    beside_nan: bool = False

    def ask(self, tensor: Tensor, what: str) -> Tensor | bool:
        """Ask a user's function, which gets the tensor detached and may do nothing to it."""
        observation, answers = Observation(tensor, what), list[Any]()
        asked = Hook()
        asked.hookline_function = function = self.function
        assert function is not None
        seen = observation.activations
        observation.carry(asked, lambda: answers.append(function(seen)), (), {})
        answer = answers[0]
        if isinstance(answer, Tensor):
            return answer.detach().bool().any()
        if isinstance(answer, bool | int | None) or type(answer).__name__ in ("bool", "bool_"):
            return bool(answer)
        raise TypeError(
            f"The condition '{self.name}' returned a {type(answer).__name__}: return whether it "
            "holds, as a bool or a tensor."
        )


def read_conditions(conditions: Conditions) -> list[Condition]:
    """Return the conditions that a user named; None is for values that are not finite."""
    found = list(_each("nonfinite" if conditions is None else conditions))
    if not found:
        raise ConfigError(f"There is no condition to look for in {conditions!r}.")
    return found


def _each(given: Any) -> Iterator[Condition]:
    if isinstance(given, str):
        yield _named(given, True)
    elif isinstance(given, Mapping):
        for name, value in given.items():
            if value is not False:
                yield _named(str(name), value)
    elif isinstance(given, Condition):
        yield given
    elif callable(given):
        name = getattr(given, "__qualname__", type(given).__qualname__)
        yield Condition(name.rpartition(".<locals>.")[2], function=given)
    elif isinstance(given, Sequence):
        for one in given:
            yield from _each(one)
    else:
        raise ConfigError(
            f"{given!r} is no condition. Give a name ({listed(_NAMES)}), a mapping such as "
            "{'magnitude': 1e4}, a function of a tensor, or a list of these."
        )


def _named(name: str, value: Any) -> Condition:
    if name == "magnitude":
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(
                f"'magnitude' needs a positive number: {{'magnitude': 1e4}}, not {value!r}."
            )
        holds = partial(_is_above, value)
        return Condition(f"magnitude above {value:g}", holds, beside_nan=True)
    if name not in _NAMES:
        raise ConfigError(
            f"There is no condition '{name}'.{nearest(name, _NAMES)} There are {listed(_NAMES)}."
        )
    if value is not True:
        raise ConfigError(
            f"The condition '{name}' takes no value, but True or False: not {value!r}."
        )
    if name == "dead":
        return Condition("dead", _is_dead)
    return Condition("nonfinite", _is_nonfinite)


def _is_above(value: float, low: float, high: float) -> bool:
    return low < -value or high > value


def _is_dead(low: float, high: float) -> bool:
    return low == high == 0


def _is_nonfinite(low: float, high: float) -> bool:
    return not (math.isfinite(low) and math.isfinite(high))


@torch.no_grad()
def extremes(tensor: Tensor, *, beside_nan: bool = False) -> tuple[Tensor, Tensor] | None:
    """Return the smallest and the largest value, unread; None where there is nothing to compare.

    Both are NaN when one value is. Of a sharded tensor it is this rank's part.

    Args:
        tensor: The tensor.
        beside_nan: Have the largest magnitude of the others instead of the second NaN. That takes
            two more passes where it cannot be seen whether there is one, which is not on a CPU.
    """
    tensor = local(tensor.detach())
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.layout is not torch.strided or not tensor.is_floating_point():
        return None
    if not tensor.numel() or tensor.is_meta:
        return None
    if tensor.element_size() == 1:  # of 8-bit numbers there is little that can be computed
        tensor = tensor.to(torch.bfloat16)
    low, high = torch.aminmax(tensor)
    if beside_nan and (tensor.device.type != "cpu" or low != low):
        others = tensor.nan_to_num(0.0, math.inf, -math.inf).abs().amax()
        high = torch.where(high.isnan(), others, high)
    return low, high


def read(scalars: Iterable[Tensor]) -> list[float]:
    """Read numbers from where they are, with one transfer for each device."""
    scalars = list(scalars)
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, scalar in enumerate(scalars):
        by_kind.setdefault((scalar.device, scalar.dtype), []).append(i)
    together: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
    for (device, dtype), places in by_kind.items():
        stacked = torch.stack([scalars[i] for i in places])
        exact = stacked if dtype == torch.float64 else stacked.float()
        together.setdefault(device, []).append((places, exact))
    values = [0.0] * len(scalars)
    for groups in together.values():
        widest = max((group for _, group in groups), key=Tensor.element_size).dtype
        flat = torch.cat([group.to(widest) for _, group in groups]).tolist()
        for i, value in zip((i for places, _ in groups for i in places), flat, strict=True):
            values[i] = value
    return values
