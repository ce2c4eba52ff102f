"""Signals that ask the process to end, kept until the loop can save a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Self

from hookline.interrupts import find_active_handler, is_main_thread
from hookline.loop.control_requests import ControlRequests


class SignalWatch:
    """While the block runs, a signal is only noted in the loop's requests.

    The handler does nothing else: the loop looks at the requests where it can save. A second signal
    acts at once, as if nobody had handled it. If the block is within another one, as where a hook
    starts another training run, the outer loop gets the signal, too. Signals that are ignored, and
    those handled outside of Python, are left alone. Outside of the main thread, Python cannot
    handle signals: then this does nothing.

    A scheduler may signal all processes of a job. Then the workers of loaders end, too, and torch
    would raise an error in the middle of a step: after a signal, the ends of child processes are
    ignored until the block ends.

    SIGINT (Ctrl-C) is always among the signals. Names that this system does not have are skipped.
    """

    def __init__(self, requests: ControlRequests, names: Iterable[str]) -> None:
        self.requests = requests
        numbers = (getattr(signal, name, None) for name in ("SIGINT", *names))
        self._numbers = [number for number in numbers if number is not None]
        self._previous: dict[int, Any] = {}
        self._replaced: dict[int, Any] = {}  # the same, after the block has ended
        self._worker_handler: Any = None  # what SIGCHLD did before a signal came
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        if is_main_thread():
            for number in self._numbers:
                previous = signal.getsignal(number)
                if previous not in (None, signal.SIG_IGN):
                    self._previous[number] = previous
                    signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        is_main = is_main_thread()  # else the handlers stay, and call those before them
        if self._worker_handler is not None and is_main:
            if signal.getsignal(signal.SIGCHLD) is _do_nothing:
                signal.signal(signal.SIGCHLD, self._worker_handler)
            self._worker_handler = None
        for number, previous in reversed(self._previous.items()):  # SIGINT, which may raise, last
            is_own = signal.getsignal(number) == self._receive  # else somebody has replaced it
            if is_own and is_main:
                signal.signal(number, find_active_handler(number, previous))
        received = self.requests.signal
        outer = getattr(self._previous.get(received or 0), "__self__", None)
        if received is not None and isinstance(outer, SignalWatch):
            outer.requests.receive_signal(received)
        if self._previous:  # else it has ended before
            self._replaced, self._previous = self._previous, {}

    def handler_before(self, number: int) -> Any:
        """Return the handler that this one has replaced; None while the block runs."""
        return self._replaced.get(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number not in self._previous:  # the block was left in another thread
            previous = self._replaced.get(number)
            if callable(previous):
                previous(number, frame)
            else:
                self._exit(number)
        elif os.getpid() != self._pid:  # in a forked process, such as a worker of a loader
            if number == signal.SIGTERM:  # others may be sent to the group: the parent decides
                self._exit(number)
        elif self.requests.signal is None:
            self.requests.receive_signal(signal.Signals(number))
            self._ignore_ended_workers()
        elif self.requests.is_requeued and number == signal.SIGTERM:
            pass  # from the scheduler, which ends the job that it has requeued: this process does
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


class TerminationWatch(SignalWatch):
    """While the block runs, SIGTERM and SIGUSR1 leave a loop of the user's own by SystemExit.

    A handler that the user has set is called as well, and decides whether the loop is left. A
    second signal ends the process at once. `on_signal` is called in the handler, when the first one
    has come; it returns whether the loop goes on for now, until `exit` is called.
    """

    def __init__(self, requests: ControlRequests, on_signal: Callable[[], bool]) -> None:
        super().__init__(requests, ())
        names = ("SIGTERM", "SIGUSR1")  # Windows has the first one only
        self._numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        self._on_signal = on_signal
        self._exits = False

    @property
    def has_received(self) -> bool:
        """Whether a signal has come, to this process or to another one that trains the model."""
        return self.requests.has_signal

    def follow(self) -> None:
        """End for the signal that another process has received.

        A handler that the user has set is called here, too: all processes decide alike.
        """
        if self.requests.signal is not None:
            return
        self.requests.end_for(signal.SIGTERM)
        previous = find_active_handler(signal.SIGTERM, self._previous.get(signal.SIGTERM))
        if callable(previous):
            previous(signal.SIGTERM, None)
        else:
            self._exits = True

    def exit(self) -> None:
        """Raise SystemExit, unless a handler of the user's decides; somebody may swallow it."""
        if self._exits:
            raise SystemExit(128 + (self.requests.signal or signal.SIGTERM))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        before = self._previous.get(number, self._replaced.get(number))
        previous = find_active_handler(number, before)  # that of a session may have ended
        is_own = os.getpid() == self._pid and number in self._previous
        is_first, waits = is_own and self.requests.signal is None, False
        if is_first:
            self.requests.receive_signal(signal.Signals(number))
            waits = self._on_signal()
        if callable(previous):
            previous(number, frame)
        elif is_first:
            self._exits = True
            self._ignore_ended_workers()
            if not waits:
                self.exit()
        else:
            self._exit(number)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""
