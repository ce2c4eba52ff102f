"""In which order hooks are called: where a new one takes its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hookline.errors import OrderError

__all__ = ["check_wishes", "place_of"]


class Placed(Protocol):
    """What placing needs to know of a hook."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def before(self) -> str | None: ...
    @property
    def after(self) -> str | None: ...


def place_of(new: Placed, order: Sequence[Placed], *, by_rank: bool = True) -> int:
    """Return the index at which a new hook goes into the order.

    Users' hooks come before built-ins, and within a rank the order is that of registration.
    `before=` puts a hook directly before another; `after=` directly after it, behind those that
    were put there already. The names must be in the order.
    """
    if new.name in (new.before, new.after):
        raise OrderError(f"'{new.name}' cannot be placed next to itself. Name another hook.")
    index = {entry.name: i for i, entry in enumerate(order)}
    if new.before is not None:
        place = index[new.before]
        if new.after is not None and index[new.after] >= place:
            raise OrderError(
                f"'{new.name}' cannot come after '{new.after}' and before '{new.before}': that is "
                f"a cycle, for '{new.after}' does not come before '{new.before}'. Drop one of them."
            )
        return place
    if new.after is not None:
        place = index[new.after] + 1
        while place < len(order) and order[place].after == new.after:
            place += 1
        return place
    if not by_rank:
        return len(order)
    unplaced = (i for i, entry in enumerate(order) if entry.before is entry.after is None)
    place = next((i for i in unplaced if order[i].rank > new.rank), len(order))
    while 0 < place < len(order) and order[place - 1].before == order[place].name:
        place -= 1  # who was put directly before it stays there
    return place


def check_wishes(order: Sequence[Placed]) -> None:
    """Raise `OrderError` when a hook took another's place and broke a wish that named it."""
    index = {entry.name: i for i, entry in enumerate(order)}
    for i, entry in enumerate(order):
        if index.get(entry.before or "", i) < i or index.get(entry.after or "", i) > i:
            other = entry.before or entry.after
            raise OrderError(
                f"The order of '{entry.name}', '{other}' is a cycle: each would have to come "
                "before the other. Drop one `before=` or `after=`."
            )
