"""Values of event arguments: lazy numbers, metrics, the training state, the step.

A loss lives on the device, and converting it to a Python number waits for the device. So hooks get
lazy numbers, which are read on first use: when they are printed, compared, computed with, or
converted with `float`.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, SupportsFloat, cast

from hookline.errors import NotSuppliedError

if TYPE_CHECKING:
    import torch

    _Float = float  # type checkers take a `LazyFloat` for the `float` it behaves like
else:
    _Float = object

__all__ = ["LazyDict", "LazyFloat", "Metrics", "State", "StepContext"]


class LazyFloat(_Float):
    """A number that is read from the device on first use.

    It computes, compares, formats, hashes and pickles like the `float` it represents. Where a real
    `float` is required (`json.dumps`), write `float(loss)`.
    """

    __slots__ = ("_value",)

    if TYPE_CHECKING:

        def __new__(cls, value: SupportsFloat | Callable[[], SupportsFloat]) -> Self: ...

    def __init__(self, value: SupportsFloat | Callable[[], SupportsFloat]) -> None:
        self._value: Any = value

    def __float__(self) -> float:
        value: Any = self._value
        if type(value) is not float:
            number: Any = value() if callable(value) else value
            value = self._value = float(number)  # waits for the device and releases the tensor
        return cast(float, value)

    def item(self) -> float:
        """Return the number as a `float`, like `Tensor.item`."""
        return float(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        return np.array(float(self), dtype=dtype)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def _delegate_to_float() -> None:
    """Give `LazyFloat` the methods and operators of `float`."""

    def method(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(float(self), name)(*args)

    def attribute(name: str) -> property:
        return property(lambda self: getattr(float(self), name))

    def binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        return lambda self, other: function(float(self), other)

    def reflected(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        return lambda self, other: function(other, float(self))

    named = ("as_integer_ratio", "conjugate", "hex", "is_integer")
    conversions = ("repr", "format", "hash", "bool", "int", "trunc", "floor", "ceil", "round")
    for name in (*named, *(f"__{name}__" for name in (*conversions, "neg", "pos", "abs"))):
        setattr(LazyFloat, name, method(name))
    for name in ("real", "imag"):
        setattr(LazyFloat, name, attribute(name))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(LazyFloat, f"__{name}__", binary(getattr(operator, name)))
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod"):
        # Not float's own methods, which do not compute with arrays and tensors.
        function = divmod if name == "divmod" else getattr(operator, name)
        setattr(LazyFloat, f"__{name}__", binary(function))
        setattr(LazyFloat, f"__r{name}__", reflected(function))
    numbers.Real.register(LazyFloat)


_delegate_to_float()


def read_lazy(value: Any) -> Any:
    """Return a `LazyFloat` or a tensor of one element as a Python number, others unchanged."""
    kind = type(value)
    if kind is float or kind is int or kind is str:
        return value
    if kind is LazyFloat:
        return float(value)
    return value.item() if _is_scalar_tensor(value) else value


def _is_scalar_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # not imported: there are no tensors
    return torch is not None and isinstance(value, torch.Tensor) and value.numel() == 1


class LazyDict(dict[str, Any]):
    """A dict whose lazy values are read on first access, and then kept as numbers.

    All access to values returns plain numbers: indexing, `get`, `items`, `values`, `pop`, `copy`,
    `|`, `dict(m)`, `{**m}`, `json.dumps(m)`, pickling. Keys, `in` and `len` do not read values.
    """

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        number = read_lazy(value)
        if number is not value:
            super().__setitem__(key, number)
        return number

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except (KeyError, NotSuppliedError):
            return default

    def __iter__(self) -> Iterator[str]:  # makes dict(m) and {**m} use __getitem__
        return super().__iter__()

    def _read_all(self) -> dict[str, Any]:
        return {key: self[key] for key in self}

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return self._read_all().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return self._read_all().values()

    def copy(self) -> dict[str, Any]:
        return self._read_all()

    def pop(self, key: str, *default: Any) -> Any:
        if key in self.keys():
            return read_lazy(super().pop(key))
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        key, value = super().popitem()
        return key, read_lazy(value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        super().setdefault(key, default)
        return self[key]

    def __or__(self, other: Any) -> Any:
        return self._read_all() | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self._read_all()

    def __eq__(self, other: object) -> bool:
        return self._read_all() == (other._read_all() if isinstance(other, LazyDict) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        return repr(self._read_all())

    def __reduce__(self) -> Any:
        return type(self), (self._read_all(),)


class Metrics(LazyDict):
    """The `metrics` of an event. `eval/<name>` is another name for `val/<name>`.

    `eval/perplexity` is derived from `val/loss`. Hooks may add values; later hooks see them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(_canonical_name(key))

    def __missing__(self, key: str) -> Any:
        if key == "val/perplexity" and "val/loss" in self.keys():
            loss = float(self["val/loss"])
            return math.inf if loss > 700 else math.exp(loss)
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        name = _canonical_name(key)
        derived = name == "val/perplexity" and super().__contains__("val/loss")
        return derived or super().__contains__(name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(_canonical_name(key), value)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(_canonical_name(key))

    def setdefault(self, key: str, default: Any = None) -> Any:
        return super().setdefault(_canonical_name(key), default)

    def pop(self, key: str, *default: Any) -> Any:
        return super().pop(_canonical_name(key), *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override]
        self.update(other)
        return self


def _canonical_name(key: Any) -> Any:
    return "val/" + key[5:] if isinstance(key, str) and key.startswith("eval/") else key


class State(LazyDict):
    """The `state` of an event: the progress of training, as a mapping.

    Args:
        known: the values.
        absent: keys that this loop does not provide, each with what to do about it; looking one
            up raises `NotSuppliedError`.
    """

    def __init__(self, known: Mapping[str, Any], absent: Mapping[str, str] | None = None) -> None:
        super().__init__(known)
        self._absent = absent or {}

    def __missing__(self, key: str) -> Any:
        if key in self._absent:
            raise NotSuppliedError(
                f"This loop does not provide state['{key}']. {self._absent[key]}"
            )
        raise KeyError(key)

    def __reduce__(self) -> Any:
        return type(self), (self._read_all(), self._absent)


@dataclass
class StepContext:
    """A step, as the `ctx` of `on_step_end`. Model and optimizer are not copies.

    A loop that uses a `HookRunner` creates it. Numbers may be tensors or functions without
    arguments; they are read on first access.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_seen: int
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    skipped: bool = False

    def lazy_field(self, name: str) -> Any:
        """Return a field without reading it: a number on a device as a `LazyFloat`."""
        value: Any = self.__dict__[name]
        is_lazy = name in _LAZY_FIELDS and (callable(value) or _is_scalar_tensor(value))
        return LazyFloat(cast(Any, value)) if is_lazy else value


class _LazyField:
    """Descriptor of a field of `StepContext` that is read on first access."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, ctx: StepContext | None, owner: type | None = None) -> Any:
        if ctx is None:
            return self
        value = ctx.__dict__[self.name]
        number = value() if callable(value) else read_lazy(value)
        if number is not value:
            ctx.__dict__[self.name] = number
        return number

    def __set__(self, ctx: StepContext, value: Any) -> None:
        ctx.__dict__[self.name] = value


# Set after the decorator has run, so that dataclass and type checkers see plain fields.
_LAZY_FIELDS = ("loss", "grad_norm", "lr", "tokens_seen", "skipped")
for _name in _LAZY_FIELDS:
    setattr(StepContext, _name, _LazyField(_name))
