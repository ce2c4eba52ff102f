"""Recognising the recomputation of activation checkpointing, and calls within calls."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from types import FrameType

import torch

__all__ = ["calls_running", "is_recomputing", "is_within", "recomputes"]


def is_recomputing() -> bool:
    """Whether activation checkpointing is running the forward again, within backward."""
    return torch._C._current_graph_task_id() != -1


def recomputes(modules: Container[int]) -> bool | None:
    """Whether what is recomputed now belongs to the model with these modules, by their `id`.

    Nothing of PyTorch tells, so this looks for modules among the local variables of the calls that
    led here. None: there is no module at all among them.
    """
    frame: FrameType | None = sys._getframe(1)
    known: bool | None = None
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        ours = frame.f_globals.get("__name__", "").startswith("hookline.probes.")
        for value in () if ours else list(frame.f_locals.values()):
            if isinstance(value, torch.nn.Module):
                if id(value) in modules:
                    return True
                known = False
        frame = frame.f_back
    return known


def calls_running(module: torch.nn.Module | None) -> int:
    """How many calls of a module are running in this thread, each within the one before it."""
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back
    return calls


def is_within(module: torch.nn.Module | None, others: Iterable[torch.nn.Module | None]) -> bool:
    """Whether the call of a module that runs in this thread is within one of these, or of itself.

    Of modules that were compiled as one there are no calls to be found here.
    """
    around = {id(other) for other in others if other is not None and other is not module}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and id(frame.f_locals.get("self")) in around:
            return True
        frame = frame.f_back
    return calls_running(module) > 1
