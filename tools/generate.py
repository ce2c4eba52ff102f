"""Write what is derived from the code but has to stand in a file.

Type checkers and editors read text, not objects made at run time: so the methods of `Hook` and the
tables of the events page are written from the event table, the tables of the trainer's page from
its configuration, and the pages of built-in hooks from their classes. `--check` changes nothing and
fails when a file is behind.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import config_pages
import hook_pages
import package_tree
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hookline.config.trainer_config import (
    HooksConfig,
    HooksSettingsConfig,
    MixConfig,
    TrainerConfig,
)
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


# What the fields mean that say nothing about it themselves.
MEANINGS = {
    "TrainerConfig.precision": "`bf16` is autocast; `fp16` is autocast with a gradient scaler",
    "TrainerConfig.scheduler_every": "when schedulers step",
    "TrainerConfig.validate_every_epochs": "validate after each N-th epoch; None: not by epochs",
    "TrainerConfig.validate_every_steps": "validate after each N-th step; None: not by steps",
    "TrainerConfig.loaders": "how several training loaders become one stream",
    "TrainerConfig.seed": "seeds Python, torch and numpy (if imported) when training begins",
    "TrainerConfig.progress": "the display; `auto` (or True) chooses, `off` (or False) is none",
    "TrainerConfig.debug": "for hooks to look at, as `trainer.config.debug`",
    "TrainerConfig.hooks": "hooks by class path, and how failures and cost are treated",
    "MixConfig.order": "which loader the next batch comes from",
    "MixConfig.length": "where an epoch ends; a number is a number of batches",
    "MixConfig.on_exhausted": "an exhausted loader is started again, or dropped",
    "HooksSettingsConfig.isolate": "a failing hook does not stop training",
    "HooksSettingsConfig.max_failures": "failures in a row after which a hook is quarantined",
    "HooksSettingsConfig.budget": "share of the run above which the costliest hook is named",
    "HooksSettingsConfig.budget_after": "seconds of training before the budget is looked at",
}


def config_tables() -> str:
    """The trainer's page: a table for the configuration and for each that is within it."""
    return "\n".join(
        [
            *_config_table(TrainerConfig),
            "",
            "`loaders` has:",
            "",
            *_config_table(MixConfig),
            "",
            "`hooks` has:",
            "",
            *_config_table(HooksConfig),
            "",
            "and its `settings`:",
            "",
            *_config_table(HooksSettingsConfig),
        ]
    )


def _config_table(kind: type[BaseModel]) -> list[str]:
    rows = [
        f"| `{name}` | {_values(field.annotation)} | {_default(field)} | "
        f"{field.description or MEANINGS[f'{kind.__name__}.{name}']} |"
        for name, field in kind.model_fields.items()
    ]
    return ["| field | values | default | meaning |", "|---|---|---|---|", *rows]


def _values(annotation: Any) -> str:
    """What a field may be, in a few words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _values(get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f'`"{value}"`' for value in get_args(annotation))
    if origin in (Union, UnionType):
        return ", ".join(_values(one) for one in get_args(annotation))
    if annotation is NoneType:
        return "None"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a `{annotation.__name__}` or a mapping"
    named = {int: "whole number", float: "number", bool: "True, False", str: "string"}
    named |= {Path: "path", list: "list", dict: "mapping"}
    return named[origin or annotation]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    return f'`"{value}"`' if isinstance(value, str | Path) else f"`{value}`"


def loop_map() -> str:
    """The loop map."""
    return "\n".join(["```text", LOOP_MAP.rstrip(), "```"])


TARGETS = (
    ("src/hookline/hook.py", "    # -- events: ", "    # -- end of events", hook_methods),
    ("docs/events.md", "<!-- events: ", "<!-- end of events", event_tables),
    ("docs/trainer.md", "<!-- config: ", "<!-- end of config", config_tables),
    ("docs/trainer.md", "<!-- loop: ", "<!-- end of loop", loop_map),
    ("README.md", "<!-- events: ", "<!-- end of events", readme_table),
    ("docs/configuration.md", "<!-- config: ", "<!-- end of config", config_pages.tables),
    ("docs/built_in.md", "<!-- hooks: ", "<!-- end of hooks", hook_pages.overview),
    ("CONTRIBUTING.md", "<!-- tree: ", "<!-- end of tree", package_tree.tree),
)


def rewritten(path: Path, start: str, end: str, text: str) -> str:
    """The file's text with what stands between the two marker lines replaced."""
    lines = path.read_text(encoding="utf-8").split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    last = next(i for i, line in enumerate(lines) if line.startswith(end))
    return "\n".join([*lines[: first + 1], "", *text.rstrip("\n").split("\n"), "", *lines[last:]])


def texts() -> Iterator[tuple[str, str]]:
    """Every file that is written, or written in parts, with its text."""
    for name, start, end, make in TARGETS:
        yield name, rewritten(ROOT / name, start, end, make())
    for hook in hook_pages.ALL:
        yield f"docs/built_in/{hook}.md", hook_pages.page(hook)


def main() -> int:
    check = "--check" in sys.argv[1:]
    behind = []
    for name, new in texts():
        path = ROOT / name
        if not path.exists() or new != path.read_text(encoding="utf-8"):
            behind.append(name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(new, encoding="utf-8")
    for name in behind:
        print(f"{name}: {'is behind its source; run `make generate`' if check else 'written'}")
    return 1 if check and behind else 0


if __name__ == "__main__":
    sys.exit(main())
