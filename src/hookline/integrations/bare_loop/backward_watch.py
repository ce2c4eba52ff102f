"""Notice calls of backward, also those that do not pass through a call of the model.

`Tensor.backward` and `torch.autograd.backward` start autograd's engine through one function, which
is replaced while at least one listener is there, and restored when the last one leaves.
`torch.autograd.grad`, and the backwards within a backward of reentrant activation checkpointing,
are not noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hookline.integrations.bare_loop.listeners import Listeners
from hookline.integrations.bare_loop.loss_divisor import LossGraph

__all__ = ["Backward", "BackwardListener", "listen_to_backward", "running_backward"]


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward that runs.

    Attributes:
        loss: the tensor that it was called on; None if it is not a single number.
        graph: what was read from the loss's graph; None if nobody needs it.
    """

    loss: torch.Tensor | None
    graph: LossGraph | None


class BackwardListener(Protocol):
    """What is called around each backward of the process, on the thread that calls it."""

    @property
    def reads_graphs(self) -> bool:
        """Whether the `graph` of a backward is used."""
        ...

    def before_backward(self) -> Any:
        """Return what `after_backward` needs to know about the time before."""
        ...

    def after_backward(self, before: Any) -> None:
        """Handle a backward that has ended; it is not called after an exception."""
        ...


_running: dict[int, Backward] = {}  # by the thread that called backward
_autograd: Any = torch.autograd
_engine = _autograd._engine_run_backward
_task_id = torch._C._current_graph_task_id


def listen_to_backward(listener: BackwardListener, on: bool) -> None:
    """Call this listener around every backward until it says otherwise, or is collected."""
    (_listeners.add if on else _listeners.remove)(listener)


def _change_engine() -> None:
    _autograd._engine_run_backward = _run_backward if _listeners else _engine


_listeners: Listeners[BackwardListener] = Listeners(_change_engine)


def running_backward() -> Backward | None:
    """Return the backward that runs; None without one, or if it cannot be told from others."""
    running = _running.copy()
    if threading.get_ident() in running:
        return running[threading.get_ident()]
    # On accelerators, hooks run on autograd's threads; the caller waits in its own.
    return next(iter(running.values())) if len(running) == 1 else None


def _run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if not kwargs.get("accumulate_grad") or _task_id() != -1:
        return _engine(outputs, *args, **kwargs)
    listeners = list(_listeners)
    before = [listener.before_backward() for listener in listeners]
    loss = outputs[0] if len(outputs) == 1 and isinstance(outputs[0], torch.Tensor) else None
    loss = None if loss is None or loss.numel() != 1 else loss
    reads_graph = loss is not None and any(listener.reads_graphs for listener in listeners)
    thread = threading.get_ident()
    _running[thread] = Backward(loss, LossGraph(loss) if loss is not None and reads_graph else None)
    try:
        result = _engine(outputs, *args, **kwargs)
        for listener, known in zip(listeners, before, strict=True):
            listener.after_backward(known)
        return result
    finally:
        _running.pop(thread, None)
