"""A captured state that has to be looked after when it is read.

A copy may still be on its way from the device, and a reference may have been changed by somebody
since. Both are settled when somebody reads, not when it is captured: nothing waits in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hookline.probes.captured_state import CONTENTS, CapturedState

__all__ = ["Check", "LazyState"]

Check = Callable[[], None]
"""Waits until something can be read, or raises when it cannot."""

_RAW: dict[str, Any] = {name: vars(CapturedState)[name] for name in CONTENTS}


class LazyState(CapturedState):
    """A state with something to do before each of its contents is read."""

    __slots__ = ("checks",)

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.checks: dict[str, Check] = {}
        super().__init__(*args, **fields)

    def contents(self) -> tuple[Any, ...]:
        """Return what was captured; for its size, so nothing is waited for."""
        return tuple(raw.__get__(self) for raw in _RAW.values())

    def __reduce__(self) -> Any:
        """A pickle, or a deep copy, is a plain state: what it holds is settled now."""
        return _plain, (dict(self),)

    def __copy__(self) -> LazyState:
        """A copy has the same tensors, and so the same to do before they are read."""
        new = LazyState(**dict.fromkeys(self))
        for name in self:
            setattr(new, name, _RAW[name].__get__(self) if name in _RAW else self[name])
        new.checks = dict(self.checks)
        return new

    def __repr__(self) -> str:
        contents = {name: raw.__get__(self) for name, raw in _RAW.items()}
        others = {name: self[name] for name in self if name not in contents}
        return repr(CapturedState(**others, **contents))


def _plain(fields: dict[str, Any]) -> CapturedState:
    return CapturedState(**fields)


def _looked_after(name: str) -> property:
    raw = _RAW[name]

    def get(self: LazyState) -> Any:
        if name in self.checks:
            self.checks[name]()
        return raw.__get__(self)

    return property(get, raw.__set__)


for _name in CONTENTS:
    setattr(LazyState, _name, _looked_after(_name))
