"""Write the parts of files that are derived from the code.

Type checkers and editors read text, not objects that exist at run time. So the methods of `Hook`
and the tables of the events page are generated from the event table, the tables of the
configuration pages from the configuration models, the pages of built-in hooks and of Lint's checks
from their classes,
the tables of other libraries' trainers from what their integrations say,
the names in the API reference from `__all__`, and llms.txt from the pages. `--check` changes
nothing and fails when a file is outdated.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import api_pages
import check_pages
import config_pages
import hook_pages
import integration_pages
import llms_page
import package_tree
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import hookline
from hookline.config.trainer_config import (
    CheckpointConfig,
    DDPConfig,
    FSDPConfig,
    HooksConfig,
    MixConfig,
    TrainerConfig,
)
from hookline.dispatch import HookSettings
from hookline.events import COMMON, EVENTS, LOOP_MAP, Argument, Event
from hookline.options import get_options

ROOT = Path(__file__).resolve().parent.parent


def _asks(arguments: tuple[Argument, ...]) -> str:
    return ", ".join(
        f"`{a.name}`" + "".join(f" (`{alias}`)" for alias in a.aliases) for a in arguments
    )


def hook_methods() -> str:
    """Return the methods of `Hook`, one for each event, and their aliases."""
    lines: list[str] = []
    for event in EVENTS.values():
        own = f"Its own arguments: {_asks(event.own)}." if event.own else ""
        doc = [f'        """{event.doc} {own}'.rstrip() + '"""']
        if len(doc[0]) > 100:
            wrapped = textwrap.wrap(own, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
            doc = [f'        """{event.doc}', "", *wrapped, '        """']
        lines += [f"    def {event.name}(self, *args: Any, **kwargs: Any) -> None:", *doc, ""]
        lines += [f"    {alias} = {event.name}" for alias in event.aliases]
        lines += [""] if event.aliases else []
    return "\n".join(lines)


def event_tables() -> str:
    """Return the events page's table of events, tables of arguments, and loop map."""

    def row(event: Event) -> str:
        names = "<br>".join(f"`{alias}`" for alias in event.aliases)
        return f"| `{event.name}` | {names} | {event.doc} | {_asks(event.own)} |"

    common = [f"- `{a.name}`: {a.doc}" for a in COMMON]
    own = {a.name: a for event in EVENTS.values() for a in event.own if a not in COMMON}
    own_rows = [
        f"- {_asks((a,))}: {a.doc}"
        for name, a in own.items()
        if name not in {c.name for c in COMMON}
    ]
    return "\n".join(
        [
            "## Table of events",
            "",
            "| event | aliases | when it is fired | arguments |",
            "|---|---|---|---|",
            *(row(event) for event in EVENTS.values()),
            "",
            "## Common arguments",
            "",
            "Every event has these arguments.",
            "",
            *common,
            "",
            "## Arguments of some events",
            "",
            *own_rows,
            "",
            "## The loop map",
            "",
            "```text",
            LOOP_MAP.rstrip(),
            "```",
        ]
    )


# The meanings of fields without a description.
MEANINGS = {
    "TrainerConfig.precision": "`bf16` is autocast; `fp16` is autocast with a gradient scaler",
    "TrainerConfig.scheduler_every": "whether schedulers step after each step or each epoch",
    "TrainerConfig.validate_every_epochs": "validate after every N-th epoch; None: not by epochs",
    "TrainerConfig.validate_every_steps": "validate after every N-th step; None: not by steps",
    "TrainerConfig.loaders": "how several training loaders are mixed",
    "TrainerConfig.seed": "seeds Python, torch and numpy (if imported) when training starts",
    "TrainerConfig.checkpoints": "how checkpoints are saved, and what signals do",
    "TrainerConfig.debug": "for hooks, as `trainer.config.debug`",
    "TrainerConfig.hooks": "hooks by class path, and how their failures and cost are handled",
    "MixConfig.order": "which loader provides the next batch",
    "MixConfig.length": "where an epoch ends; an integer is a number of batches",
    "MixConfig.on_exhausted": "whether an exhausted loader restarts or is dropped",
}


def config_lists() -> str:
    """Return the fields of `TrainerConfig` and of the models inside it."""
    return "\n".join(
        [
            *_config_list(TrainerConfig),
            "",
            "## loaders",
            "",
            *_config_list(MixConfig),
            "",
            "## ddp",
            "",
            *_config_list(DDPConfig),
            "",
            "## fsdp",
            "",
            *_config_list(FSDPConfig),
            "",
            "## checkpoints",
            "",
            *_config_list(CheckpointConfig),
            "",
            "## hooks",
            "",
            *_config_list(HooksConfig),
            "",
            "## hooks.settings",
            "",
            *_options_list(HookSettings),
        ]
    )


def _config_list(kind: type[BaseModel]) -> list[str]:
    return [
        f"- `{name}` ({_values(field.annotation)}; {_default(field)}): "
        f"{field.description or MEANINGS[f'{kind.__name__}.{name}']}"
        for name, field in kind.model_fields.items()
    ]


def _options_list(kind: type) -> list[str]:
    return [
        f"- `{option.name}` ({_values(option.hint)}; `{option.default}`): {option.text}"
        for option in get_options(kind).values()
    ]


def _values(annotation: Any) -> str:
    """Return the valid values of a field, as text."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _values(get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f'`"{value}"`' for value in get_args(annotation))
    if origin in (Union, UnionType):
        return ", ".join(_values(member) for member in get_args(annotation))
    if annotation is NoneType:
        return "None"
    if isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or is_dataclass(annotation)
    ):
        return f"`{annotation.__name__}` or mapping"
    named = {int: "integer", float: "number", bool: "boolean", str: "string"}
    named |= {Path: "path", list: "list", dict: "mapping"}
    return named[origin or annotation]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or is_dataclass(value):
        return "below"
    return f'`"{value}"`' if isinstance(value, str | Path) else f"`{value}`"


TARGETS = (
    ("src/hookline/hook.py", "    # -- events: ", "    # -- end of events", hook_methods),
    ("docs/events.md", "<!-- events: ", "<!-- end of events", event_tables),
    ("docs/trainer_config.md", "<!-- config: ", "<!-- end of config", config_lists),
    ("docs/configuration_reference.md", "<!-- config: ", "<!-- end of config", config_pages.tables),
    ("docs/built_in.md", "<!-- hooks: ", "<!-- end of hooks", hook_pages.overview),
    ("docs/checks.md", "<!-- checks: ", "<!-- end of checks", check_pages.table),
    ("mkdocs.yml", "          # checks: ", "          # end of checks", check_pages.navigation),
    ("CONTRIBUTING.md", "<!-- tree: ", "<!-- end of tree", package_tree.folders),
    ("docs/code_tree.md", "<!-- tree: ", "<!-- end of tree", package_tree.tree),
)


def rewritten(path: Path, start: str, end: str, text: str) -> str:
    """Return the file's text, with the lines between the two markers replaced."""
    lines = path.read_text(encoding="utf-8").split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    last = next(i for i, line in enumerate(lines) if line.startswith(end))
    return "\n".join([*lines[: first + 1], "", *text.rstrip("\n").split("\n"), "", *lines[last:]])


def public_stub() -> str:
    """Return `hookline/__init__.pyi`: the imports of all public names."""
    lines = ['"""The public names; written by `make generate` from `hookline/__init__.py`."""', ""]
    lines += ["from hookline import config_files as config_files"]
    lines += [f"from hookline import {name} as {name}" for name in ("probes", "updates")]
    lines += ["from hookline._version import __version__ as __version__"]
    for module, names in hookline._MODULES.items():
        lines += [f"from hookline.{module} import {name} as {name}" for name in names]
    lines += ["", *(f"{alias} = {name}" for alias, name in hookline._ALIASES.items())]
    return "\n".join(lines) + "\n"


def texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the new text of every generated file."""
    for name, start, end, make in TARGETS:
        yield name, rewritten(ROOT / name, start, end, make())
    for library in integration_pages.PAGES:
        page = ROOT / f"docs/{library}.md"
        table = integration_pages.table(library)
        yield f"docs/{library}.md", rewritten(page, "<!-- generated: ", "<!-- end -->", table)
    for name, text in hook_pages.pages().items():
        yield f"docs/built_in/{name}.md", text
    for name, text in check_pages.pages().items():
        yield f"docs/checks/{name}.md", text
    for topic in api_pages.PAGES:
        yield f"docs/api/{topic}.md", api_pages.page(topic)
    yield "llms.txt", llms_page.llms_text()
    yield "src/hookline/__init__.pyi", public_stub()


def main() -> int:
    check = "--check" in sys.argv[1:]
    outdated = []
    for name, new in texts():
        path = ROOT / name
        if not path.exists() or new != path.read_text(encoding="utf-8"):
            outdated.append(name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(new, encoding="utf-8")
    for name in outdated:
        print(f"{name}: {'is outdated; run `make generate`' if check else 'written'}")
    return 1 if check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
