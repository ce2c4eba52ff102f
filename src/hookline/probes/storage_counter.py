"""The exact count of bytes that captured states keep alive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["StorageCounter"]


class StorageCounter:
    """Counts memory once, however many states share it.

    Whoever asks it to `hold` places keeps their memory alive until it calls `release`: else a place
    might be given to others and be taken for the same memory.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._held: dict[Any, int] = {}  # how many states, by place

    def hold(self, places: Mapping[Any, tuple[int, Any]]) -> None:
        """Count what a state keeps alive, as `storages` gives it."""
        for place, (size, _) in places.items():
            states = self._held.get(place, 0)
            self._held[place] = states + 1
            if not states:
                self.nbytes += size

    def release(self, places: Mapping[Any, tuple[int, Any]]) -> None:
        """Take back what `hold` counted."""
        for place, (size, _) in places.items():
            states = self._held[place] - 1
            if states:
                self._held[place] = states
            else:
                del self._held[place]
                self.nbytes -= size

    def new(self, places: Mapping[Any, tuple[int, Any]]) -> int:
        """Return how many bytes `hold` would add."""
        return sum(size for place, (size, _) in places.items() if place not in self._held)
