"""The tables of the pages about other libraries' trainers, made from their `LIBRARY`."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

PAGES = ("transformers", "lightning", "ignite")
"""The integrations; each has a page of the same name, when it is written."""


def table(integration: str) -> str:
    """Return where the events of a host fire, and why not; those alike in several by name."""
    hosts = {page: import_module(f"hookline.integrations.{page}").LIBRARY for page in PAGES}
    counts = Counter(row for host in hosts.values() for row in host.rows())
    alike = {row for row, count in counts.items() if count > 1}
    host = hosts[integration]
    rows = [
        f"| `{event}` | {where or 'is not given: ' + host.missing[event]} |"
        for event, where in host.rows()
        if (event, where) not in alike
    ]
    same = ", ".join(f"`{event}`" for event, where in host.rows() if (event, where) in alike)
    return "\n".join(
        [
            "| event | where it fires |",
            "|---|---|",
            *rows,
            "",
            f"As in [your own loop](bare_loop.md#events-of-an-unchanged-loop): {same}.",
        ]
    )
