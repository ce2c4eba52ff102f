"""Tables of names and values from elsewhere, in aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hookline.printable import printable

_MAX_CELL = 200
_MAX_LAST_CELL = 1000


def format_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    limit: int | None = None,
    right: Collection[int] = (),
) -> str:
    """Return rows under headers, in aligned columns.

    Control characters are escaped, long cells are cut.

    Args:
        headers: The name of each column.
        rows: The cells.
        limit: The number of rows after which the rest is only counted; None for all.
        right: The columns that are aligned on the right.
    """
    lines = [printable_cells(line) for line in [headers, *rows[:limit]]]
    widths = [max(cell_width(line[i]) for line in lines) for i in range(len(headers))]
    table = [
        "  ".join(
            pad(cell, width, right=i in right)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join(table + [_count_more(len(rows) - len(lines) + 1)] * (len(rows) >= len(lines)))


def join_lines(lines: Sequence[str], limit: int, what: str = "") -> str:
    """Return lines with control characters escaped; after `limit` the rest is only counted."""
    shown = [printable(line, _MAX_LAST_CELL) for line in lines[:limit]]
    return "\n".join(shown + [_count_more(len(lines) - limit) + what] * (len(lines) > limit))


def join_some(items: Iterable[object], limit: int = 50, item_limit: int = 100) -> str:
    """Return items on one line, separated by commas; after `limit` the rest is only counted."""
    every = list(items)
    shown = [printable(item, item_limit) for item in every[:limit]]
    return ", ".join(shown + [_count_more(len(every) - limit)] * (len(every) > limit))


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return a text filled up to a width on the terminal."""
    spaces = " " * (width - cell_width(text))
    return spaces + text if right else text + spaces


def cell_width(text: str) -> int:
    """Return how many columns of the terminal a text takes: two for each wide character."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def printable_cells(cells: Sequence[str]) -> list[str]:
    """Return the cells of a row as they are shown; the last one may be longer."""
    last = len(cells) - 1
    return [
        printable(cell, _MAX_LAST_CELL if i == last else _MAX_CELL) for i, cell in enumerate(cells)
    ]


def _count_more(count: int) -> str:
    return f"… and {count} more"
