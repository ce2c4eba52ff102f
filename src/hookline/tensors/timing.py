"""Measuring how long modules take, forward and backward, without waiting for the device.

On the CPU the clock is read. On other devices an event is recorded in the stream, and its time is
read in the report. Backward is timed by hooks on the autograd nodes that a call has created: before
the first of them runs, and after the last ones, whose gradients leave the module. PyTorch's own
backward hooks of modules would add nodes to the graph.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor

Timestamp: TypeAlias = Any
"""A point in time: seconds of `perf_counter`, or a recorded event of a device."""

_MAX_SPANS = 4096  # kept before the finished ones are summed up


def record_time(device: torch.device | None) -> Timestamp:
    """Record the current point in the device's stream; on the CPU, the current time."""
    if device is None or device.type == "cpu":
        return perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def timed_device(device: torch.device) -> torch.device | None:
    """Return the device if it can time its own work; None if the wall clock has to be used."""
    if device.type == "cpu":
        return None
    try:
        record_time(device)
    except (RuntimeError, NotImplementedError, TypeError):  # it has no timed events
        return None
    return device


def elapsed_ms(begin: Timestamp, end: Timestamp) -> float:
    """Return the milliseconds between two times; this waits until the device has reached both."""
    if isinstance(begin, float):
        return float(end - begin) * 1e3
    end.synchronize()
    return float(begin.elapsed_time(end))


def is_over(point: Timestamp) -> bool:
    """Return whether the device has reached this time."""
    return isinstance(point, float) or bool(point.query())


class Span:
    """The time from one time to another, without the pauses in between."""

    __slots__ = ("begin", "device", "end", "name", "pauses")

    def __init__(self, name: str, device: torch.device | None) -> None:
        self.name = name
        self.device = device
        self.begin = record_time(device)
        self.end: Timestamp = None
        self.pauses: list[tuple[Timestamp, Timestamp]] = []

    def pause(self, begin: Timestamp, end: Timestamp) -> None:
        """Do not count the time between these times."""
        if isinstance(self.begin, float) is isinstance(begin, float):
            self.pauses.append((begin, end))

    def milliseconds(self) -> float:
        """Return how long it took."""
        return elapsed_ms(self.begin, self.end) - sum(elapsed_ms(*pause) for pause in self.pauses)


class Times:
    """The total time of each module over all its calls. Threads may add at the same time."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque()
        self._sums: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Add a span, which may still be running."""
        self._spans.append(span)
        if len(self._spans) > _MAX_SPANS:
            self._sum_up(wait=False)

    def take(self) -> dict[str, float]:
        """Return milliseconds by name, and reset. This waits for spans that are still running."""
        self._sum_up(wait=True)
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums

    def _sum_up(self, *, wait: bool) -> None:
        with self._lock:
            for _ in range(len(self._spans)):  # other threads may add meanwhile
                span = self._spans.popleft()
                if span.end is None or not (wait or is_over(span.end)):
                    self._spans.append(span)
                else:
                    self._sums[span.name] = self._sums.get(span.name, 0.0) + span.milliseconds()


class BackwardTimes(Times):
    """The total backward time of each module."""

    def watch(self, name: str, outputs: Iterable[Tensor], since: int) -> None:
        """Time the backward of the nodes that a call has created since a `graph_position`."""
        roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
        first = [node for node in dict.fromkeys(roots) if _is_inside(node, since)]
        if not first:
            return  # there is no graph, or the module returned its input
        device = next(output.device for output in outputs if output.grad_fn is not None)
        timer = _BackwardTimer(self, name, device)
        for node in first:
            node.register_prehook(timer.begin)
        for node in _exit_nodes(first, since):
            node.register_hook(timer.end)


class _BackwardTimer:
    """Times the backward of one call. Only the graph references it, so both are freed together."""

    def __init__(self, times: BackwardTimes, name: str, device: torch.device) -> None:
        self._times, self._name, self._device = times, name, device
        self._task: int | None = None
        self._span: Span | None = None

    def begin(self, *_: Any) -> None:
        """Start a span before the first node of each backward; a call may have several of both."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._span = Span(self._name, self._device)
            self._times.add(self._span)

    def end(self, *_: Any) -> None:
        """Move the end of the span to here: the last exit node to run sets it for good."""
        if self._span is not None:
            self._span.end = record_time(self._device)


def graph_position() -> int:
    """Return the sequence number that this thread's next autograd node will get."""
    torch_c: Any = torch._C
    return int(torch_c._autograd._get_sequence_nr())


def _is_inside(node: Any, since: int) -> bool:
    is_leaf = type(node).__name__ == "AccumulateGrad"  # accumulates a parameter's gradient
    return not is_leaf and int(node._sequence_nr()) >= since


def _exit_nodes(first: list[Any], since: int) -> list[Any]:
    """Return the nodes whose gradients go to parameters, or to nodes older than the call."""
    found: list[Any] = []
    seen: set[Any] = set(first)
    pending = list(first)
    while pending:
        node = pending.pop()
        following = [target for target, _ in node.next_functions if target is not None]
        inside = [target for target in following if _is_inside(target, since)]
        if len(inside) < len(following):
            found.append(node)
        new = [target for target in dict.fromkeys(inside) if target not in seen]
        seen.update(new)
        pending += new
    return found
