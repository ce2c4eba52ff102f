"""Finding the hooks that make a difference, by switching off half of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["find_culprits"]

_MOST = 5  # culprits that are looked for

Test = Callable[[Sequence[str]], bool]


def find_culprits(
    names: Sequence[str], make_test: Callable[[Sequence[str]], Test | None]
) -> list[tuple[str, ...]]:
    """Return the hooks that make a difference; several together if none of them does alone.

    Args:
        names: The hooks.
        make_test: Gets the hooks that are left. Returns None if they make no difference, else a
            function that returns whether some of them do.
    """
    culprits: list[tuple[str, ...]] = []
    remaining = list(names)
    while remaining and len(culprits) < _MOST:
        differs = make_test(remaining)
        if differs is None:
            break
        found = _narrow(remaining, differs)
        culprits.append(tuple(found))
        remaining = [name for name in remaining if name not in found]
    return culprits


def _narrow(names: list[str], differs: Test) -> list[str]:
    """Return a smallest part that still makes a difference; all of them do."""
    if len(names) == 1:
        return names
    middle = len(names) // 2
    for half in (names[:middle], names[middle:]):
        if differs(half):
            return _narrow(half, differs)
    return names
