"""Importing torch, which takes a second, from a command."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["interrupted_afterwards"]


@contextmanager
def interrupted_afterwards() -> Generator[None, None, None]:
    """Let Ctrl-C wait: an import of torch that is torn apart ends in errors about other things."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and before is not signal.SIG_IGN:
        raise KeyboardInterrupt
