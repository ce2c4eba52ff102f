"""How long modules take, forward and backward, without waiting and without touching the graph.

On the CPU the clock is read, on other devices an event is put into the stream and looked at in the
report. Backward is timed by hooks on the nodes that a call has made in the graph: before the first
of them runs, and after the last ones, which lead out of the module. PyTorch's own backward hooks of
modules would put nodes of theirs into it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["BackwardTimes", "Mark", "Span", "Times", "graph_position", "mark"]

Mark: TypeAlias = Any
"""A moment: seconds, or an event of a device."""

_MANY = 4096  # spans that are kept before those that are over are added up


def mark(device: torch.device | None) -> Mark:
    """Mark this moment in what the device has to do; on the CPU it is now."""
    if device is None or device.type == "cpu":
        return perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _milliseconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float):
        return float(end - begin) * 1e3
    end.synchronize()
    return float(begin.elapsed_time(end))


def _is_over(moment: Mark) -> bool:
    return isinstance(moment, float) or bool(moment.query())


class Span:
    """From one moment to another, less the pauses in between."""

    __slots__ = ("begin", "device", "end", "name", "pauses")

    def __init__(self, name: str, device: torch.device | None) -> None:
        self.name = name
        self.device = device
        self.begin = mark(device)
        self.end: Mark = None
        self.pauses: list[tuple[Mark, Mark]] = []

    def pause(self, begin: Mark, end: Mark) -> None:
        """What was between these moments does not count."""
        if isinstance(self.begin, float) is isinstance(begin, float):
            self.pauses.append((begin, end))

    def milliseconds(self) -> float:
        """How long it took."""
        return _milliseconds(self.begin, self.end) - sum(_milliseconds(*one) for one in self.pauses)


class Times:
    """How long modules take, all calls together. Threads may add at the same time."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque()
        self._sums: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Add a span that is over, or will be."""
        self._spans.append(span)
        if len(self._spans) > _MANY:
            self._sum_up(waits=False)

    def take(self) -> dict[str, float]:
        """Return milliseconds by name, and begin anew. This waits for what is not over yet."""
        self._sum_up(waits=True)
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums

    def _sum_up(self, *, waits: bool) -> None:
        with self._lock:
            for _ in range(len(self._spans)):  # others may go on adding
                span = self._spans.popleft()
                if span.end is None or not (waits or _is_over(span.end)):
                    self._spans.append(span)
                else:
                    self._sums[span.name] = self._sums.get(span.name, 0.0) + span.milliseconds()


class BackwardTimes(Times):
    """How long backward takes in modules, as far as it is run."""

    def watch(self, name: str, outputs: Iterable[Tensor], since: int) -> None:
        """Time the backward of the nodes that a call has made.

        Args:
            name: the module.
            outputs: what it returned.
            since: `graph_position()` before it ran.
        """
        roots = [one.grad_fn for one in outputs if one.grad_fn is not None]
        first = [node for node in dict.fromkeys(roots) if _is_inside(node, since)]
        if not first:
            return  # there is no graph, or it returns what came in
        device = next(one.device for one in outputs if one.grad_fn is not None)
        pass_ = _Pass(self, name, device)
        for node in first:
            node.register_prehook(pass_.begin)
        for node in _ways_out(first, since):
            node.register_hook(pass_.end)


class _Pass:
    """The backward of one call. Only the graph holds it, so it goes when the graph does."""

    def __init__(self, times: BackwardTimes, name: str, device: torch.device) -> None:
        self._times = times
        self._name = name
        self._device = device
        self._task: int | None = None
        self._span: Span | None = None

    def begin(self, *_: Any) -> None:
        """One of the first nodes is about to run; there may be several, and several backwards."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._span = Span(self._name, self._device)
            self._times.add(self._span)

    def end(self, *_: Any) -> None:
        """A node that leads out of the module has run; perhaps not the last one."""
        if self._span is not None:
            self._span.end = mark(self._device)


def graph_position() -> int:
    """Where the graph stands: nodes that are made from now on, by this thread, come after it."""
    counted: Any = torch._C
    return int(counted._autograd._get_sequence_nr())


def _is_inside(node: Any, since: int) -> bool:
    is_leaf = type(node).__name__ == "AccumulateGrad"  # where the gradient of a parameter is added
    return not is_leaf and int(node._sequence_nr()) >= since


def _ways_out(first: list[Any], since: int) -> list[Any]:
    """The nodes, from these on, that lead to some that were there before, or to parameters."""
    found: list[Any] = []
    seen: set[Any] = set(first)
    waiting = list(first)
    while waiting:
        node = waiting.pop()
        following = [one for one, _ in node.next_functions if one is not None]
        inside = [one for one in following if _is_inside(one, since)]
        if len(inside) < len(following):
            found.append(node)
        new = [one for one in dict.fromkeys(inside) if one not in seen]
        seen.update(new)
        waiting += new
    return found
