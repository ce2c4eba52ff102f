"""Values of event arguments: lazy numbers, metrics, the training state, the step.

A loss lives on the device, and converting it to a Python number waits for the device. So loops have
lazy numbers, which are read on first use: when a hook asks for a plain number, or when a hook that
asked for a `LazyFloat` prints, compares, computes with or converts it.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Self, SupportsFloat, cast

from hookline.arguments import describe_value, show_value
from hookline.errors import (
    ArgumentError,
    NotProvidedError,
    UnknownMetricError,
    listed,
    nearest,
)

if TYPE_CHECKING:
    import torch

    _Float = float  # type checkers take a `LazyFloat` for the `float` it behaves like
else:
    _Float = object

_MAX_SHOWN = 2000  # characters of a value in a mapping's `repr`


class LazyFloat(_Float):
    """A number that is read from the device on first use.

    A hook that annotates `loss: LazyFloat` gets one, and does not wait for the device before it
    uses the number. It computes, compares, formats, hashes and pickles like the `float` it
    represents. Where a real `float` is required (`json.dumps`), write `float(loss)`.
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
            try:  # as `to_float` does; a hook's loss is read here in each step
                value = float(number)  # waits for the device
            except OverflowError:
                value = to_float(number)
            self._value = value  # releases the tensor
        result: float = value
        return result

    def read_with(self, other: LazyFloat) -> None:
        """Read this and another number from their device in one transfer, when one is used."""
        both: tuple[Any, ...] = (self, other)
        values = [number._value for number in both]  # noqa: SLF001  (of this class)
        torch = sys.modules["torch"]
        if not all(isinstance(value, torch.Tensor) for value in values):
            return
        if values[0].dtype != values[1].dtype or values[0].device != values[1].device:
            return

        def read(index: int) -> float:
            found = torch.stack([value.reshape(()) for value in values]).tolist()
            for number, value in zip(both, found, strict=True):
                number._value = value  # noqa: SLF001
            return cast(float, found[index])

        for index, number in enumerate(both):
            number._value = partial(read, index)  # noqa: SLF001

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


def to_float(value: Any) -> float:
    """Return a number as a float; an integer above the range of floats is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def read_lazy(value: Any) -> Any:
    """Return a `LazyFloat` or a tensor of one element as a Python number, others unchanged."""
    kind = type(value)
    if kind is float or kind is int or kind is str:
        return value
    if kind is LazyFloat:
        return float(value)
    return value.item() if _is_scalar_tensor(value) else value


def numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among values, read from the device."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float | LazyFloat)
    }


def _is_scalar_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # not imported: there are no tensors
    return torch is not None and isinstance(value, torch.Tensor) and value.numel() == 1


NO_LOSS = LazyFloat(math.nan)
"""The loss of a batch or step in which no backward has run."""


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
        except (KeyError, NotProvidedError):
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
        return "{" + ", ".join(f"{show_value(key)}: {self._show(key)}" for key in self) + "}"

    def _show(self, key: str) -> str:
        try:
            return show_value(self[key], limit=_MAX_SHOWN)
        except Exception as error:  # reading a lazy value may fail
            return f"<cannot be read: {type(error).__name__}>"

    def __reduce__(self) -> Any:
        return type(self), (self._read_all(),)


class Metrics(LazyDict):
    """The `metrics` of an event. `eval/<name>` is another name for `val/<name>`.

    `eval/perplexity` is derived from `val/loss`. Hooks may add values; later hooks see them.
    """

    _prefix, _other_prefix = "val/", "eval/"
    _origin: MutableMapping[str, Any] | None = None
    """The metrics that these are a view of, with other names; changes reach them, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    @classmethod
    def for_eval(cls, metrics: Metrics) -> Metrics:
        """Return the metrics of `on_eval_end`: the same, named `eval/…`."""
        view = cls()
        view._prefix, view._other_prefix = "eval/", "val/"
        for key, value in dict.items(metrics):
            dict.__setitem__(view, view._name(key), value)
        if "val/perplexity" in metrics and not dict.__contains__(view, "eval/perplexity"):
            perplexity = LazyFloat(lambda: metrics["val/perplexity"])
            dict.__setitem__(view, "eval/perplexity", perplexity)
        view._origin = metrics
        return view

    def _name(self, key: Any) -> Any:
        """Return the name under which a metric is stored."""
        is_other = isinstance(key, str) and key.startswith(self._other_prefix)
        return self._prefix + key.removeprefix(self._other_prefix) if is_other else key

    def __getitem__(self, key: str) -> Any:
        if not isinstance(key, str):
            raise self._unknown(key)  # it may have no hash
        return super().__getitem__(self._name(key))

    def __missing__(self, key: str) -> Any:
        if key == "val/perplexity" and "val/loss" in self.keys():
            loss = float(self["val/loss"])
            return math.inf if loss > 700 else math.exp(loss)
        raise self._unknown(key, nearest(key, self._names()))

    def _names(self) -> list[str]:
        return [name for name in self.keys() if isinstance(name, str)]

    def _unknown(self, key: Any, hint: str = "") -> UnknownMetricError:
        return UnknownMetricError(
            f"There is no metric {show_value(key)}.{hint} There are: {listed(self._names())}."
        )

    def __contains__(self, key: object) -> bool:
        name = self._name(key)
        derived = name == "val/perplexity" and super().__contains__("val/loss")
        return derived or super().__contains__(name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(self._name(key), value)
        if self._origin is not None:
            self._origin[key] = value

    def __delitem__(self, key: str) -> None:
        super().__delitem__(self._name(key))
        if self._origin is not None:
            self._origin.pop(key, None)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if self._origin is not None:
            self._origin.pop(key, None)
        return super().pop(self._name(key), *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        try:
            new = dict(*args, **kwargs)
        except Exception as error:
            raise ArgumentError(
                f"Metrics are made from a mapping of names to numbers, not from "
                f"{', '.join(map(describe_value, args))} ({type(error).__name__}: "
                f"{show_value(str(error))})."
            ) from error
        for key, value in new.items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override]
        self.update(other)
        return self

    def __reduce__(self) -> Any:  # a view keeps its names
        return type(self) if self._origin is None else dict, (self._read_all(),)


class State(LazyDict):
    """The `state` of an event: the progress of training, as a mapping.

    Args:
        known: the values.
        absent: keys that this loop does not provide, each with what to do about it; looking one
            up raises `NotProvidedError`.
    """

    def __init__(self, known: Mapping[str, Any], absent: Mapping[str, str] | None = None) -> None:
        super().__init__(known)
        self._absent = absent or {}

    def __missing__(self, key: str) -> Any:
        if key in self._absent:
            raise NotProvidedError(
                f"This loop does not provide state['{key}']. {self._absent[key]}"
            )
        raise KeyError(key)

    def __reduce__(self) -> Any:
        return type(self), (self._read_all(), self._absent)


@dataclass(frozen=True)
class NotProvided:
    """A field of a `StepContext` that the loop does not provide; reading it raises an error."""

    message: str

    def __call__(self) -> Any:
        raise NotProvidedError(self.message)

    def __repr__(self) -> str:
        return "<not provided>"


@dataclass(repr=False)
class StepContext:
    """A step, as the `ctx` of `on_step_end`. Model and optimizer are not copies.

    A loop that uses a `HookRunner` creates it. Numbers may be tensors or functions without
    arguments; they are read on first access. The numbers of a context that a hook keeps remain
    those of its step.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_seen: int
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    skipped: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepContext):
            return NotImplemented
        return self.__getstate__() == other.__getstate__()  # without what is not provided

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = self.__getstate__()
        shown = ", ".join(f"{field.name}={values[field.name]!r}" for field in fields(self))
        return f"{type(self).__name__}({shown})"

    def __getstate__(self) -> dict[str, Any]:
        values = self.__dict__
        provided = (name for name in _LAZY_FIELDS if not isinstance(values[name], NotProvided))
        return {**values, **{name: getattr(self, name) for name in provided}}

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
        number = read_lazy(value() if callable(value) else value)
        if number is not value:
            ctx.__dict__[self.name] = number
        return number

    def __set__(self, ctx: StepContext, value: Any) -> None:
        ctx.__dict__[self.name] = value


# Set after the decorator has run, so that dataclass and type checkers see plain fields.
_LAZY_FIELDS = ("loss", "grad_norm", "lr", "tokens_seen", "skipped")
for _name in _LAZY_FIELDS:
    setattr(StepContext, _name, _LazyField(_name))
