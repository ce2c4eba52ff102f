"""One captured state: what went into a module, came out of it and flowed back, in one call."""

from __future__ import annotations

import time as _time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from hookline.tensors.memory import storages
from hookline.tensors.nested import map_tensors, tensors_in

__all__ = ["CONTENTS", "CapturedState", "shape_of"]

CONTENTS = ("input", "kwargs", "output", "gradient")
"""The fields that hold what was captured; the others say where and when."""


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class CapturedState(Mapping[str, Any]):
    """What one call of a module took and gave. Also a mapping: `state["output"]`.

    Tensors stand where they stood: in tuples, dicts, objects and so on. What was not captured is
    None.

    Args:
        module: The module's name.
        probe: The probe's name.
        step: Completed optimizer steps before the call; None outside of training.
        epoch: The epoch; None outside of training.
        call: Which call of the module it was, from 0, within the model's outermost call; in
            training where that is not seen, within the step. To a manager of modules each is a
            model of its own: there it is 0, unless the module calls itself.
        layer_idx: What the probe was given to tell its layer.
        time: When, in seconds since 1970.
        input: The positional arguments.
        kwargs: The keyword arguments.
        output: What was returned.
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
        """Return what was captured, as it stands, without the names."""
        return self.input, self.kwargs, self.output, self.gradient

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors within, one in several places each time."""
        return tensors_in(self.contents())

    @property
    def nbytes(self) -> int:
        """The bytes that it keeps alive: whole storages, also under views, each once."""
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
        return self is other  # a mapping's would compare tensors

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        said = [f"{name}={self[name]!r}" for name in _WHERE if self[name] is not None]
        held = [f"{name}={_shown(self[name])}" for name in CONTENTS if self[name] is not None]
        return f"CapturedState({', '.join([repr(self.module), *said, *held])})"


_FIELDS = {f.name: None for f in fields(CapturedState)}
_WHERE = ("probe", "step", "epoch", "call", "layer_idx")


def _shown(value: Any) -> str:
    """A value with shapes instead of tensors."""
    try:
        return repr(map_tensors(value, _Shape))
    except Exception:  # an object that shows itself may need its tensors for that
        shapes = ", ".join(repr(_Shape(tensor)) for tensor in tensors_in(value))
        return f"<{type(value).__name__} of {shapes}>"


def shape_of(tensor: Any) -> str:
    """Return what is shown of a tensor: `float32[2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class _Shape:
    """Stands for a tensor in a repr."""

    def __init__(self, tensor: Tensor) -> None:
        self._text = shape_of(tensor)

    def __repr__(self) -> str:
        return self._text
