"""The tables of the pages about other libraries' trainers, made from their `LIBRARY`."""

from __future__ import annotations

from importlib import import_module

PAGES = ("transformers", "lightning", "ignite")
"""The integrations; each has a page of the same name, when it is written."""


def table(integration: str) -> str:
    """Return where each event fires in a host, and why the others do not."""
    host = import_module(f"hookline.integrations.{integration}").LIBRARY
    rows = [
        f"| `{event}` | {where or 'is not given: ' + host.missing[event]} |"
        for event, where in host.rows()
    ]
    return "\n".join(["| event | where it fires |", "|---|---|", *rows])
