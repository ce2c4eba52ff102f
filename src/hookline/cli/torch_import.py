"""Importing torch from a command, which takes a second."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["delay_interrupts"]


@contextmanager
def delay_interrupts() -> Generator[None, None, None]:
    """Delay Ctrl-C until the end: interrupting the import of torch raises unrelated errors."""
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received and previous is not signal.SIG_IGN:
        raise KeyboardInterrupt
