"""Signals that ask the process to end, kept until the loop can save a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

from hookline.loop.control_requests import ControlRequests

__all__ = ["SignalWatch"]


class SignalWatch:
    """While the block runs, a signal is only noted in the loop's requests.

    The handler does nothing else: the loop looks at the requests where it can save. A second signal
    acts at once, as if nobody had handled it. If the block is within another one, as a training
    that a hook of a training starts, that loop gets the signal, too. Signals that are ignored, and
    those handled outside of Python, are left alone. Outside of the main thread, Python cannot
    handle signals: then this does nothing.

    A scheduler may signal all processes of a job. Then the workers of loaders end, too, and torch
    would raise an error in the middle of a step: after a signal, the ends of child processes are
    ignored until the block ends.

    Args:
        requests: the requests of the loop.
        names: the signals, apart from SIGINT (Ctrl-C), which is always among them. Names that this
            system does not have are skipped.
    """

    def __init__(self, requests: ControlRequests, names: Iterable[str]) -> None:
        self._requests = requests
        numbers = (getattr(signal, name, None) for name in ("SIGINT", *names))
        self._numbers = [number for number in numbers if number is not None]
        self._previous: dict[int, Any] = {}
        self._replaced: dict[int, Any] = {}  # the same, after the block has ended
        self._worker_handler: Any = None  # what SIGCHLD did before a signal came
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                previous = signal.getsignal(number)
                if previous not in (None, signal.SIG_IGN):
                    self._previous[number] = previous
                    signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._receive:  # else somebody has replaced it
                signal.signal(number, _find_active(number, previous))
        if self._worker_handler is not None:
            if signal.getsignal(signal.SIGCHLD) is _do_nothing:
                signal.signal(signal.SIGCHLD, self._worker_handler)
            self._worker_handler = None
        received = self._requests.signal
        outer = getattr(self._previous.get(received or 0), "__self__", None)
        if received is not None and isinstance(outer, SignalWatch):
            outer._requests.receive_signal(received)
        self._replaced, self._previous = self._previous, {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # in a forked process, such as a worker of a loader
            if (
                number == signal.SIGTERM
            ):  # others may be sent to the whole group: the parent decides
                self._exit(number)
        elif self._requests.signal is None:
            self._requests.receive_signal(signal.Signals(number))
            self._ignore_ended_workers()
        else:
            self.__exit__()
            self._exit(number)

    def _ignore_ended_workers(self) -> None:
        """Keep torch from raising in the middle of a step, or of a save, when a worker has ended.

        A signal to the process group, as a cluster sends it, ends the workers of loaders, too.
        """
        number = getattr(signal, "SIGCHLD", None)
        if number is not None and callable(previous := signal.getsignal(number)):
            self._worker_handler = previous
            signal.signal(number, _do_nothing)

    @staticmethod
    def _exit(number: int) -> None:
        """Do what the signal does by default: end the process."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _find_active(number: int, handler: Any) -> Any:
    """Return the handler to restore: blocks need not end in the order in which they are nested."""
    watch = getattr(handler, "__self__", None)
    while isinstance(watch, SignalWatch) and number in watch._replaced:
        handler = watch._replaced[number]
        watch = getattr(handler, "__self__", None)
    return handler


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""
