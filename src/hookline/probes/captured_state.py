"""One captured state: a module's input, output and gradient in one call.

A `LazyState` is one whose contents have to be checked before they are read: a copy may still be
under way from the device, and a reference may have been changed in place. Both are dealt with when
somebody reads them, so capturing never waits for the device.
"""

from __future__ import annotations

import time as _time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from hookline.printable import printable
from hookline.tensors.memory import storages
from hookline.tensors.nested import tensors_in

CONTENTS = ("input", "kwargs", "output", "gradient")
"""The fields that hold what was captured; the others say where and when."""

Check = Callable[[], None]
"""Waits until something can be read, or raises if it cannot."""


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class CapturedState(Mapping[str, Any]):
    """The captured contents of one call of a module. Also a mapping: `state["output"]`.

    Tensors are where they were: in tuples, dicts, objects and so on. What was not captured is None.

    Args:
        module: The module's name.
        probe: The probe's name.
        step: The number of optimizer steps completed before the call; None outside of training.
        epoch: The epoch; None outside of training.
        call: The number of the module's call, from 0, within the model's outermost call; in
            training where that is not seen, within the step. For a manager each module is a model
            of its own, so there it is 0 unless the module calls itself.
        layer_idx: The layer's number, as given to the probe, or the first in the module's name.
        time: When, in seconds since 1970.
        input: The positional arguments.
        kwargs: The keyword arguments.
        output: What the module returned.
        gradient: The gradient of the output.
    """

    module: str
    probe: str = ""
    step: int | None = None
    epoch: int | None = None
    call: int = 0
    layer_idx: int | None = None
    time: float = field(default_factory=_time.time)
    input: Any = None
    kwargs: Any = None
    output: Any = None
    gradient: Any = None

    def contents(self) -> tuple[Any, ...]:
        """Return what was captured, in the order of `CONTENTS`, without any checks."""
        return self.input, self.kwargs, self.output, self.gradient

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors within, each as often as it occurs."""
        return tensors_in(self.contents())

    @property
    def nbytes(self) -> int:
        """The bytes that the state keeps alive: whole storages, also of views, each once."""
        return sum(size for size, _ in storages(self.contents()).values())

    def __getitem__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_FIELDS)

    def __len__(self) -> int:
        return len(_FIELDS)

    def __eq__(self, other: object) -> bool:
        return self is other  # that of Mapping would compare tensors

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        names = ("probe", "step", "epoch", "call", "layer_idx")
        where = [
            f"{name}={printable(repr(self[name]))}" for name in names if self[name] is not None
        ]
        values = zip(CONTENTS, self.contents(), strict=True)
        captured = [f"{name}={_with_shapes(value)}" for name, value in values if value is not None]
        return f"CapturedState({', '.join([printable(repr(self.module)), *where, *captured])})"


_FIELDS = {f.name: None for f in fields(CapturedState)}


class LazyState(CapturedState):
    """A state with a check to run before each of its contents is read."""

    __slots__ = ("checks",)

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.checks: dict[str, Check] = {}
        super().__init__(*args, **fields)

    def __getattribute__(self, name: str) -> Any:
        if name in CONTENTS and name in self.checks:
            self.checks[name]()
        return super().__getattribute__(name)

    def contents(self) -> tuple[Any, ...]:
        """Return what was captured, without any checks."""
        return tuple(super(LazyState, self).__getattribute__(name) for name in CONTENTS)

    def __reduce__(self) -> Any:
        """Pickle and copy as a plain state: the checks run now."""
        return CapturedState, tuple(self.values())


def shape_text(tensor: Any) -> str:
    """Return dtype and shape of a tensor as text: `float32[2, 3]`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if getattr(tensor, "is_nested", False):  # it has no shape, or one with symbols
        return f"nested {dtype}[{tensor.size(0)}, …]"
    return f"{dtype}{list(tensor.shape)}"


def _with_shapes(value: Any) -> str:
    """Return the repr of a value with shapes instead of tensors."""
    if isinstance(value, Tensor):
        return shape_text(value)
    if type(value) in (tuple, list):
        inside = ", ".join(map(_with_shapes, value))
        one = "," if len(value) == 1 else ""
        return f"[{inside}]" if type(value) is list else f"({inside}{one})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_with_shapes(v)}' for key, v in value.items())}}}"
    shapes = ", ".join(map(shape_text, tensors_in(value)))
    return f"<{type(value).__name__} of {shapes}>" if shapes else repr(value)
