"""BackgroundWorker: handles items one after another on a thread of its own, beside training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundWorker(Generic[T]):
    """Handles items in their order, on a thread that runs while there are any.

    `handle` gets an item, and the event that the time for what is left is over. If more than
    `limit` are waiting, the oldest is dropped.
    """

    def __init__(self, name: str, handle: Callable[[T, threading.Event], None], limit: int) -> None:
        self._stopped = threading.Event()
        self._name, self._handle, self._limit = name, handle, limit
        self._waiting: deque[T] = deque()
        self._current: list[T] = []
        self._changed = threading.Condition()
        self._is_running = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._current) + len(self._waiting)

    def add(self, item: T) -> list[T]:
        """Queue an item; return those that are dropped."""
        with self._changed:
            self._waiting.append(item)
            dropped = [self._waiting.popleft() for _ in range(len(self._waiting) - self._limit)]
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return dropped

    def end(self, seconds: float, grace: float = 0.0) -> list[T]:
        """Wait until all are handled; return those that are not when the time is over.

        The one in progress may notice within the `grace` that it is stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running, seconds)
            self._stopped.set()
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._is_running, grace)
            return [*self._current, *left]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = [self._waiting.popleft()] if self._waiting else []
                if not self._current:
                    self._is_running = False
                    self._changed.notify_all()
                    return
            self._handle(self._current[0], self._stopped)
