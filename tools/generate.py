"""Write what is derived from `events.py` but has to stand in a file.

Type checkers and editors read text, not objects made at run time: so the methods of `Hook` and the
tables of the events page are written from the event table. `--check` changes nothing and fails
when a file is behind.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from hookline.events import COMMON, EVENTS, LOOP_MAP, Argument, Event

ROOT = Path(__file__).resolve().parent.parent


def _asks(arguments: tuple[Argument, ...]) -> str:
    return ", ".join(
        f"`{a.name}`" + "".join(f" (`{alias}`)" for alias in a.aliases) for a in arguments
    )


def hook_methods() -> str:
    """The methods of `Hook`, one for each event and alias."""
    lines: list[str] = []
    for event in EVENTS.values():
        doc = event.doc
        if event.own:
            doc += "\n\n" + "\n".join(textwrap.wrap(f"Its own arguments: {_asks(event.own)}.", 92))
        lines += _method(event.name, doc)
        for alias in event.aliases:
            lines += _method(alias, f"Another name for `{event.name}`.")
    return "\n".join(lines)


def _method(name: str, doc: str) -> list[str]:
    body = doc.split("\n")
    end = [] if len(body) == 1 else ['        """']
    first = f'        """{body[0]}' + ('"""' if not end else "")
    rest = [f"        {line}".rstrip() for line in body[1:]]
    return [f"    def {name}(self, *args: Any, **kwargs: Any) -> None:", first, *rest, *end, ""]


def event_tables() -> str:
    """The events page: common arguments, the table of events, the loop map."""

    def row(event: Event) -> str:
        names = "<br>".join(f"`{alias}`" for alias in event.aliases)
        return f"| `{event.name}` | {names} | {event.doc} | {_asks(event.own)} |"

    common = [f"| `{a.name}` | {a.doc} |" for a in COMMON]
    own = {a.name: a for event in EVENTS.values() for a in event.own if a not in COMMON}
    own_rows = [
        f"| `{a.name}` | {', '.join(f'`{x}`' for x in a.aliases)} | {a.doc} |"
        for name, a in own.items()
        if name not in {c.name for c in COMMON}
    ]
    return "\n".join(
        [
            "## The events",
            "",
            "| event | also called | when | its own arguments |",
            "|---|---|---|---|",
            *(row(event) for event in EVENTS.values()),
            "",
            "## What every event can be asked for",
            "",
            "| argument | what it is |",
            "|---|---|",
            *common,
            "",
            "## What some events can be asked for besides",
            "",
            "| argument | also called | what it is |",
            "|---|---|---|",
            *own_rows,
            "",
            "## The loop map",
            "",
            "```text",
            LOOP_MAP.rstrip(),
            "```",
        ]
    )


def readme_table() -> str:
    """The short table of the README."""
    return "\n".join(
        [
            "| event | also called | its own arguments |",
            "|---|---|---|",
            *(
                f"| `{e.name}` | {', '.join(f'`{x}`' for x in e.aliases)} | {_asks(e.own)} |"
                for e in EVENTS.values()
            ),
        ]
    )


TARGETS = (
    ("src/hookline/hook.py", "    # -- events: ", "    # -- end of events", hook_methods),
    ("docs/events.md", "<!-- events: ", "<!-- end of events", event_tables),
    ("README.md", "<!-- events: ", "<!-- end of events", readme_table),
)


def rewritten(path: Path, start: str, end: str, text: str) -> str:
    """The file's text with what stands between the two marker lines replaced."""
    lines = path.read_text(encoding="utf-8").split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    last = next(i for i, line in enumerate(lines) if line.startswith(end))
    return "\n".join([*lines[: first + 1], "", *text.rstrip("\n").split("\n"), "", *lines[last:]])


def main() -> int:
    check = "--check" in sys.argv[1:]
    behind = []
    for name, start, end, make in TARGETS:
        path = ROOT / name
        new = rewritten(path, start, end, make())
        if new != path.read_text(encoding="utf-8"):
            behind.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    for name in behind:
        print(f"{name}: {'is behind events.py; run `make generate`' if check else 'written'}")
    return 1 if check and behind else 0


if __name__ == "__main__":
    sys.exit(main())
