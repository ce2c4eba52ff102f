"""Finds the tensor that backward was called on.

Autograd's hooks do not get it, and the loss is a local variable of the user's loop. But while hooks
run, `torch.autograd.backward` is on the stack of the thread that called it, with the loss.
Reading it there changes nothing and costs about a microsecond; wrapping `backward` would affect
every tensor of the process.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any

import torch

__all__ = ["caller_of", "differentiated_tensor"]

_BACKWARD = torch.autograd.backward.__code__  # `Tensor.backward` calls it, too


def differentiated_tensor() -> torch.Tensor | None:
    """Return the tensor that the running backward was called on; None if it is not just one."""
    found = _find(sys._getframe(1))
    if found is None:
        # On accelerators, hooks run on autograd's threads; the caller waits in its own.
        others = [
            tensor
            for thread, frame in sys._current_frames().items()
            if thread != threading.get_ident() and (tensor := _find(frame)) is not None
        ]
        found = others[0] if len(others) == 1 else None
    return found


def _find(frame: FrameType | None) -> torch.Tensor | None:
    while frame is not None:
        if frame.f_code is _BACKWARD:
            tensors = frame.f_locals["tensors"]
            is_single = len(tensors) == 1 and isinstance(tensors[0], torch.Tensor)
            return tensors[0] if is_single and tensors[0].numel() == 1 else None
        frame = frame.f_back
    return None


def caller_of(code: CodeType) -> Any:
    """Return the object whose method with this code is on this thread's stack; None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
