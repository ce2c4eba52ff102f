"""A call of a module, and the calls that run in each thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Call", "ThreadLocal", "ThreadState"]


@dataclass(slots=True)
class Call:
    """One call of a module, or one occurrence of a named value.

    A probe with `wants_before` gets the same object before and after the module runs; `output` is
    None before. In a compiled model `args` and `output` are flat tuples of the tensors.
    """

    name: str
    module: torch.nn.Module | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    index: int
    recomputed: bool = False
    compiled: bool = False
    step: int | None = None
    epoch: int | None = None
    saved: Any = None
    """For the probe: what it stores in `before` to use in `after`."""
    input_replaced: bool = False
    """In `after`: whether another hook has replaced the arguments since `before`."""


@dataclass(slots=True, eq=False)
class ThreadState:
    """The forward that runs in a thread."""

    depth: int = 0  # of calls of the model: 2 if it has called itself
    forward: int = 0  # its number, from 1
    gradients: bool = True  # whether they were enabled when it began
    error: BaseException | None = None  # the one that was being handled when it began
    step: int | None = None  # the one that is counted in where the model's own call is not seen
    counts: dict[str, int] = field(default_factory=dict[str, int])
    calls: list[tuple[Call, BaseException | None]] = field(default_factory=list[Any])
    """The calls that run, the innermost last, each with the error being handled at its start."""

    def pop(self, name: str, output: Any) -> tuple[Call | None, bool]:
        """Return the innermost running call of a name, if its start was seen, and if it failed."""
        calls = self.calls
        while calls:
            call, error = calls.pop()  # those within it were interrupted
            if call.name == name:
                return call, sys.exception() is not error
        return None, output is None and sys.exception() is not None


class ThreadLocal(threading.local):
    """The state of each thread, looked up once per hook: a thread-local attribute is slow."""

    def __init__(self) -> None:
        self.state = ThreadState()
