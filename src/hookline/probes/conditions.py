"""The conditions that a debug probe checks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from hookline.arguments import check_mapping, read_attribute, read_items, show_value
from hookline.errors import ArgumentError, ConfigError, listed, nearest
from hookline.probes.extractor import call_user_function

__all__ = ["Condition", "Conditions", "read_conditions"]

Conditions: TypeAlias = Any
"""`"nonfinite"`, `"dead"`, `{"magnitude": 1e4}`, a function of a tensor, or a list of these."""

_NAMES = ("nonfinite", "magnitude", "dead")


@dataclass(frozen=True)
class Condition:
    """A condition to check. It has either `holds` or `function`."""

    name: str
    holds: Callable[[float, float], bool] | None = None
    """Returns whether it holds, from the smallest and the largest value."""
    function: Callable[[Tensor], Any] | None = None
    """A user's function of the tensor; returns a bool or a tensor."""
    beside_nan: bool = False
    """Whether it has to know the other values if one is NaN."""

    def ask(self, tensor: Tensor, what: str) -> Tensor | bool:
        """Call the user's function with the detached tensor, which it must not change."""
        assert self.function is not None
        answer = call_user_function(self.function, tensor, what)
        if isinstance(answer, Tensor):
            return answer.detach().bool().any()
        if isinstance(answer, bool | int | None) or type(answer).__name__ in ("bool", "bool_"):
            return bool(answer)
        raise ArgumentError(
            f"The condition '{self.name}' returned a {type(answer).__name__}. Return a bool or a "
            "tensor."
        )


def read_conditions(conditions: Conditions) -> list[Condition]:
    """Return the conditions that a user gave; None stands for `"nonfinite"`."""
    try:
        found = list(_each("nonfinite" if conditions is None else conditions))
    except RecursionError:
        raise ConfigError("The conditions are a list that is too deeply nested.") from None
    if not found:
        raise ConfigError(f"{show_value(conditions)} contains no condition. Give at least one.")
    return found


def _each(given: Any) -> Iterator[Condition]:
    if isinstance(given, str):
        yield _named(given, True)
    elif isinstance(given, Mapping):
        for name, value in check_mapping("conditions", given).items():
            if value is not False:
                yield _named(name, value)
    elif isinstance(given, Condition):
        yield given
    elif callable(given):
        name = read_attribute(given, "__qualname__") or type(given).__qualname__
        yield Condition(name.rpartition(".<locals>.")[2], function=given)
    elif isinstance(given, Sequence | Set):
        several = sorted(given, key=str) if isinstance(given, Set) else given
        for condition in read_items("conditions", several, "a list of conditions"):
            yield from _each(condition)
    else:
        raise ConfigError(
            f"{show_value(given)} is not a condition. Give a name ({listed(_NAMES)}), a mapping "
            "such as "
            "{'magnitude': 1e4}, a function of a tensor, or a list of these."
        )


def _named(name: str, value: Any) -> Condition:
    if name == "magnitude":
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= sys.float_info.max
        ):
            raise ConfigError(
                f"'magnitude' needs a positive number, as in {{'magnitude': 1e4}}; got "
                f"{show_value(value)}."
            )
        return Condition(f"magnitude above {value:g}", partial(_is_above, value), beside_nan=True)
    if name not in _NAMES:
        raise ConfigError(
            f"Unknown condition '{name}'.{nearest(name, _NAMES)} The conditions are: "
            f"{listed(_NAMES)}."
        )
    if value is not True:
        raise ConfigError(f"The condition '{name}' is True or False; got {show_value(value)}.")
    if name == "dead":
        return Condition("dead", _is_dead)
    return Condition("nonfinite", _is_nonfinite)


def _is_above(value: float, low: float, high: float) -> bool:
    return low < -value or high > value


def _is_dead(low: float, high: float) -> bool:
    return low == high == 0


def _is_nonfinite(low: float, high: float) -> bool:
    return not (math.isfinite(low) and math.isfinite(high))
