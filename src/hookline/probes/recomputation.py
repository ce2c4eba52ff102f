"""Activation checkpointing: recognizing a recomputation and the calls that it repeats.

The reentrant kind runs the first pass of a segment without gradients, inside the
`forward(ctx, …)` of an autograd function, and again in its `backward(ctx, …)`. Only the second pass
has a graph, so what a probe remembers of a call in the first pass has to be found again in the
second. Both have the same `ctx`: what is remembered is stored on it, in the order of the calls, and
freed with it. It is found on the Python stack, the only place that has it. The non-reentrant kind
needs none of this: its first pass has the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Hashable
from types import FrameType
from typing import Any

import torch

_REMEMBERED = "_hookline_remembered"


def is_recomputing() -> bool:
    """Return whether activation checkpointing is running the forward again, within backward."""
    return torch._C._current_graph_task_id() != -1


def recomputes(modules: Container[int]) -> bool | None:
    """Return whether the recomputation that runs now belongs to the model with these modules.

    PyTorch does not say, so this looks for modules, by `id`, among the local variables on the
    Python stack, and returns None if there are none at all.
    """
    frame: FrameType | None = sys._getframe(1)
    found: bool | None = None
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        ours = frame.f_globals.get("__name__", "").startswith("hookline.probes.")
        for value in () if ours else list(frame.f_locals.values()):
            if isinstance(value, torch.nn.Module):
                if id(value) in modules:
                    return True
                found = False
        frame = frame.f_back
    return found


def running_modules() -> list[int]:
    """Return the `id` of each module whose call runs in this thread, innermost first.

    Modules that were compiled into one graph have no calls on the Python stack.
    """
    frame: FrameType | None = sys._getframe(1)
    modules: list[int] = []
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            modules.append(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return modules


def remember_call(key: Hashable, value: Any) -> None:
    """Store a value for a call in the first pass of a reentrant segment; elsewhere do nothing."""
    ctx, _ = _find_segments()
    if ctx is not None:
        values: dict[Hashable, list[Any]] = vars(ctx).setdefault(_REMEMBERED, {})
        values.setdefault(key, []).append(value)


def recall_call(key: Hashable) -> Any:
    """Return what was stored for the call that is being repeated, or None."""
    _, ctx = _find_segments()
    values: dict[Hashable, list[Any]] = {} if ctx is None else vars(ctx).get(_REMEMBERED, {})
    if key not in values:
        return None
    # Several backwards through one graph repeat it from the start each time.
    positions: dict[Any, tuple[int, int]] = vars(ctx).setdefault(_REMEMBERED + "_read", {})
    task = torch._C._current_graph_task_id()
    last_task, position = positions.get(key, (task, 0))
    position = position if last_task == task else 0
    positions[key] = (task, position + 1)
    return values[key][position] if position < len(values[key]) else None


def has_gradients() -> bool:
    """Return whether a forward that runs now can be differentiated, also in a reentrant segment.

    A compiled graph runs within an autograd function, with gradients disabled.
    """
    return torch.is_grad_enabled() or _find_segments()[0] is not None


def _find_segments() -> tuple[Any, Any]:
    """Return the `ctx` of the segment in its first pass, the outermost, and of the repeated one."""
    first: Any = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_name
        if name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, torch.autograd.function.FunctionCtx):
                if name == "backward":
                    return first, ctx
                first = ctx
        frame = frame.f_back
    return first, None
