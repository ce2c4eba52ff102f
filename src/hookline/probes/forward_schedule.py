"""Schedules of probes outside of training, where there are no steps to count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import ConfigError
from hookline.probes.recomputation import recall_call, remember_call

if TYPE_CHECKING:
    from hookline.probes.call import Call
    from hookline.probes.probe import Probe

__all__ = ["ForwardSchedule"]


class ForwardSchedule:
    """Calls a probe in the forwards N, 2N, 3N … of the model; the `guard` of an attachment.

    A forward is due or not as a whole, with all calls of all modules in it. Where the model's own
    call is not seen (`model.forward(x)`, a submodule called directly), each call of a module counts
    as a forward.

    Args:
        probe: the probe.
        every: N.
        guard: what calls the probe when it is due.
    """

    def __init__(self, probe: Probe, every: int, guard: Callable[..., Any] | None = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every is {every!r}; expected a whole number of at least 1.")
        self._probe = probe
        self._every = every
        self._guard = guard or _call_directly
        self._state = _ThreadState()
        self._direct_calls: dict[str, count[int]] = {}

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the probe with these arguments, if it is due."""
        is_after = function == self._probe.after
        if is_after or function == self._probe.before:
            due = self._is_due(args[0], is_after=is_after)
        elif args:
            due = True  # a gradient of a call that was due
        else:  # the start or end of a forward
            forward_due = self._is_forward_due()
            due = self._state.last if forward_due is None else forward_due
        return self._guard(function, *args) if due else None

    def _is_due(self, call: Call, *, is_after: bool) -> bool:
        # Reentrant checkpointing runs a segment without gradients first, and again in backward.
        key = self, call.name
        if call.recomputed:
            return not is_after or recall_call(key) is not False
        due = self._is_forward_due()
        if due is None:
            due = self._is_direct_call_due(call, is_after=is_after)
        if is_after and self._probe.wants_recomputed and not torch.is_grad_enabled():
            remember_call(key, due)
        return due

    def _is_forward_due(self) -> bool | None:
        """Return whether the forward in progress is due, or None if there is none."""
        attachment = self._probe.attachment
        number = None if attachment is None else attachment.forward_number
        return None if number is None else number % self._every == 0

    def _is_direct_call_due(self, call: Call, *, is_after: bool) -> bool:
        state = self._state
        seen_before = is_after and self._probe.wants_before and call.module is not None
        if not seen_before or call.name not in state.due:
            number = next(self._direct_calls.setdefault(call.name, count(1)))
            state.due[call.name] = number % self._every == 0
        state.last = state.due[call.name]
        return state.last


class _ThreadState(threading.local):
    """The calls outside of a forward of the model that run in this thread."""

    def __init__(self) -> None:
        self.due: dict[str, bool] = {}  # by the module's name
        self.last = True


def _call_directly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
