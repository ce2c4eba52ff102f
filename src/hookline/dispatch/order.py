"""In which order hooks are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from hookline.errors import OrderError, listed

__all__ = ["in_order"]


class Placed(Protocol):
    """What placing needs to know of a registered hook."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def before(self) -> str | None: ...
    @property
    def after(self) -> str | None: ...


P = TypeVar("P", bound=Placed)


def in_order(entries: Sequence[P], *, by_rank: bool = True) -> list[P]:
    """Return hooks in calling order; `entries` come in the order of registration.

    By rank (users' hooks, then built-ins), within a rank by registration. `before=` puts a hook
    directly before another; `after=` directly after it, behind those already put there. A wish
    about a hook that has been removed since is void.
    """
    names = {entry.name for entry in entries}
    waiting: list[P] = []
    placed: list[P] = []
    for entry in sorted(entries, key=lambda entry: entry.rank if by_rank else 0):
        (waiting if {entry.before, entry.after} & names else placed).append(entry)
    while waiting:
        done = {entry.name for entry in placed}
        ready = [e for e in waiting if {e.before, e.after} & names <= done]
        if not ready:
            raise OrderError(
                f"The order of {listed(e.name for e in waiting)} is a cycle: each waits for "
                "another of them. Drop one `before=` or `after=`."
            )
        for entry in ready:
            _place(entry, placed, names)
            waiting.remove(entry)
    return placed


def _place(entry: P, placed: list[P], names: set[str]) -> None:
    position = {other.name: i for i, other in enumerate(placed)}
    first, last = 0, len(placed)
    if entry.after in names:
        first = position[str(entry.after)] + 1
    if entry.before in names:
        last = position[str(entry.before)]
    if first > last:
        raise OrderError(
            f"'{entry.name}' cannot come after '{entry.after}' and before '{entry.before}': "
            f"'{entry.before}' comes first. Drop one of the two."
        )
    if entry.before not in names:
        last = first
        while last < len(placed) and placed[last].after == entry.after:
            last += 1
    placed.insert(last, entry)
