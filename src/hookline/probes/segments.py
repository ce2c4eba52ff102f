"""Which call a recomputation repeats, under the reentrant kind of activation checkpointing.

That kind runs the first pass of a segment without gradients, inside the `forward(ctx, …)` of an
autograd function, and again in its `backward(ctx, …)`. Only the second pass has a graph, so what
was noted in the first has to be found again there. Both have the same `ctx`: notes are kept on it,
in the order of the calls, and go with it. It is found on the stack, since nothing else knows it.
The other kind needs none of this: its first pass has the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from types import FrameType
from typing import Any

import torch

__all__ = ["has_gradients", "note", "noted"]

_NOTES = "_hookline_notes"


def note(who: Hashable, what: Any) -> None:
    """Note something of a call that has no graph; outside of a segment nothing is kept."""
    ctx, _ = _segments()
    if ctx is not None:
        notes: dict[Hashable, list[Any]] = vars(ctx).setdefault(_NOTES, {})
        notes.setdefault(who, []).append(what)


def noted(who: Hashable) -> Any:
    """Return what was noted of the call that is being repeated, or None."""
    _, ctx = _segments()
    notes: dict[Hashable, list[Any]] = {} if ctx is None else vars(ctx).get(_NOTES, {})
    if who not in notes:
        return None
    # Several backwards through one graph repeat it from the start each time.
    positions: dict[Any, tuple[int, int]] = vars(ctx).setdefault(_NOTES + "_read", {})
    task = torch._C._current_graph_task_id()
    last, position = positions.get(who, (task, 0))
    position = position if last == task else 0
    positions[who] = (task, position + 1)
    return notes[who][position] if position < len(notes[who]) else None


def has_gradients() -> bool:
    """Whether a forward that runs now can be differentiated, in a segment too.

    What a compiled model runs is within an autograd function, and without gradients there.
    """
    return torch.is_grad_enabled() or _segments()[0] is not None


def _segments() -> tuple[Any, Any]:
    """The segment whose first pass this is, the outermost if nested, and the one being repeated."""
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
