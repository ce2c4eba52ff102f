"""Ctrl-C that waits until a piece of work is done, so that nothing is left half done.

Python raises KeyboardInterrupt between any two instructions of the main thread: also when a hook
was registered on a module and its handle is not stored yet, or within the code that removes it.
"""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self


class HeldInterrupts:
    """While the block runs, Ctrl-C or another signal waits for its end. A second one acts at once.

        with HeldInterrupts():
            self.handle = module.register_forward_hook(hook)
            with AllowedInterrupts():
                hook.on_train_start()  # of a user, and may take long

    Blocks may be nested. Where the signal is ignored or handled outside of Python, and outside of
    the main thread, nothing happens.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        self.is_holding = True
        self._number = number
        self._previous: Any = None  # the handler; None if it was not replaced
        self._has_received = self._has_ended = False

    def __enter__(self) -> Self:
        previous = signal.getsignal(self._number) if is_main_thread() else None
        if previous not in (None, signal.SIG_IGN):
            self._previous = previous
            signal.signal(self._number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is None:
            return
        self._previous = find_active_handler(self._number, self._previous)
        if signal.getsignal(self._number) == self._receive:  # else somebody has replaced it
            signal.signal(self._number, self._previous)
        self.is_holding, self._has_ended = False, True
        self.deliver()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_holding and not self._has_received:
            self._has_received = True
        else:
            self._act(frame)

    def _act(self, frame: FrameType | None) -> None:
        """Do what the signal does outside of the block."""
        if callable(self._previous):
            self._previous(self._number, frame)
        else:
            signal.signal(self._number, self._previous)
            signal.raise_signal(self._number)

    def deliver(self) -> None:
        """Do now what a signal does that has been waiting, if there is one."""
        if self._has_received:
            self._has_received = False
            self._act(None)

    def handler_before(self, number: int) -> Any:
        """Return the handler that this one has replaced; None while the block runs."""
        return self._previous if self._has_ended else None


class AllowedInterrupts:
    """Within a block in which Ctrl-C waits: it acts at once in this one."""

    def __init__(self) -> None:
        self._held: HeldInterrupts | None = None

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT) if is_main_thread() else None
        held = getattr(handler, "__self__", None)
        if isinstance(held, HeldInterrupts) and held.is_holding:
            self._held = held
            held.is_holding = False
            try:
                held.deliver()
            except BaseException:  # `__exit__` is not called
                held.is_holding = True
                raise

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.is_holding = True


def find_active_handler(number: int, handler: Any) -> Any:
    """Return the handler to restore: blocks need not end in the order in which they are nested."""
    while True:
        block: Any = getattr(handler, "__self__", None)
        before = block.handler_before(number) if hasattr(block, "handler_before") else None
        if before is None:
            return handler
        handler = before


def is_main_thread() -> bool:
    """Return whether this is the thread in which Python handles signals."""
    return threading.current_thread() is threading.main_thread()


def remember_interrupt() -> None:
    """Let Python end by SIGINT after a KeyboardInterrupt that nobody has caught.

    It does so by itself, and a shell then stops, too. But it notes the interrupt where a string is
    executed, and forgets it when the next one is: when a dataclass is made, for example.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
