"""Functions of torch that are replaced while somebody listens, and put back when nobody does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Listeners"]

T = TypeVar("T")


class Listeners(Generic[T]):
    """Those who listen; the first one has functions replaced, the last one has them put back.

    A listener that is collected without having left does not listen any more. Reading needs no
    lock: the listeners are replaced as a whole.

    Args:
        changed: called with a lock held, after listeners have come or gone: it replaces functions,
            or puts them back, as the listeners need it.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._lock = threading.RLock()  # a listener may be collected at any time
        self._references: tuple[weakref.ref[T], ...] = ()

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            if (listener := reference()) is not None:
                yield listener

    def __len__(self) -> int:
        return len(self._references)

    def add(self, listener: T) -> None:
        """Let somebody listen; once, also if this is called again."""
        with self._lock:
            if not any(other is listener for other in self):
                self._references = (*self._references, weakref.ref(listener, self._drop))
                self._changed()

    def remove(self, listener: T) -> None:
        """Let somebody listen no more."""
        for reference in self._references:
            if reference() is listener:
                self._drop(reference)

    def _drop(self, reference: weakref.ref[T]) -> None:
        with self._lock:
            self._references = tuple(one for one in self._references if one is not reference)
            self._changed()
