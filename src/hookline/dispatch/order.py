"""The order in which hooks are called."""

from __future__ import annotations

from collections.abc import Sequence

from hookline.dispatch.entry import Entry
from hookline.errors import OrderError


def find_place(new: Entry, entries: Sequence[Entry], *, by_group: bool = True) -> int:
    """Return the index at which to insert a new hook.

    Users' hooks come before built-ins, and hooks of the same group are in registration order.
    `before=` places a hook directly before another; `after=` directly after it and after those
    already placed there. The named hooks must be among the entries.
    """
    if new.name in (new.before, new.after):
        raise OrderError(f"'{new.name}' cannot be placed next to itself. Name another hook.")
    index = {entry.name: i for i, entry in enumerate(entries)}
    if new.before is not None:
        place = index[new.before]
        if new.after is not None and index[new.after] >= place:
            raise OrderError(
                f"'{new.name}' cannot come after '{new.after}' and before '{new.before}', because "
                f"'{new.after}' does not come before '{new.before}'. Remove one of them."
            )
        return place
    if new.after is not None:
        place = index[new.after] + 1
        while place < len(entries) and entries[place].after == new.after:
            place += 1
        return place
    if not by_group:
        return len(entries)
    unplaced = (i for i, entry in enumerate(entries) if entry.before is entry.after is None)
    place = next((i for i in unplaced if entries[i].group > new.group), len(entries))
    while 0 < place < len(entries) and entries[place - 1].before == entries[place].name:
        place -= 1  # hooks placed directly before another stay there
    return place


def registration_order(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries so that each follows those that its `before` and `after` name.

    Registering them in this order results in the same calling order.
    """
    ordered: list[Entry] = []
    names: set[str | None] = {None}
    while len(ordered) < len(entries):
        found = next(e for e in entries if e.name not in names and {e.before, e.after} <= names)
        ordered.append(found)
        names.add(found.name)
    return ordered


def check_order(entries: Sequence[Entry]) -> None:
    """Raise `OrderError` if a hook is on the wrong side of the one its `before` or `after` names.

    This happens when a hook is replaced by one that is placed elsewhere.
    """
    index = {entry.name: i for i, entry in enumerate(entries)}
    for i, entry in enumerate(entries):
        if index.get(entry.before or "", i) < i or index.get(entry.after or "", i) > i:
            other = entry.before or entry.after
            raise OrderError(
                f"The order of '{entry.name}', '{other}' is a cycle: each would have to come "
                "before the other. Remove one `before=` or `after=`."
            )
