"""The tables of the pages about other libraries' trainers, made from their `LIBRARY`."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

PAGES = ("transformers", "lightning", "ignite")
"""The integrations; each has a page of the same name."""


def table(integration: str) -> str:
    """Return where the events of a library fire, and why not, unless several are alike."""
    libraries = {page: import_module(f"hookline.integrations.{page}").LIBRARY for page in PAGES}
    counts = Counter(row for library in libraries.values() for row in library.rows())
    alike = {row for row, count in counts.items() if count > 1}
    library = libraries[integration]
    rows = [
        f"| `{event}` | {where or 'never: ' + library.missing[event]} |"
        for event, where in library.rows()
        if (event, where) not in alike
    ]
    return "\n".join(
        [
            "| event | where it fires |",
            "|---|---|",
            *rows,
            "",
            "Other events fire as in [your own loop](bare_loop.md#events-of-an-unchanged-loop).",
        ]
    )
