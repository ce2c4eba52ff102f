"""`hookline hooks` and `hookline events`: what can be put into a training, and when it runs."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from hookline.cli.help_format import Command, Group
from hookline.cli.text_output import room, show
from hookline.cli.torch_import import interrupted_afterwards
from hookline.errors import HooklineError

__all__ = ["events", "hooks_app"]

_WIDTH = 100

hooks_app = typer.Typer(
    name="hooks",
    cls=Group,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def _complete(incomplete: str) -> list[str]:
    """Return the names that begin like this; nothing that takes long is imported."""
    from hookline.config import known_hooks

    return [name for name in known_hooks() if name.startswith(incomplete)]


@hooks_app.callback(invoke_without_command=True)
def hooks(context: typer.Context, as_json: Json = False) -> None:
    """List all hooks that have a name: Hookline's own, and those of installed packages.

    The kinds: a **loop** hook is called by events, a **forward** hook sees what the model returns,
    an **update** transforms gradients, a **probe** sits on modules of the model.

    Example: **hookline hooks**, and then **hookline hooks show early_stopping**
    """
    context.obj = as_json
    if context.invoked_subcommand is None:
        _list_hooks(as_json)


@hooks_app.command("show", cls=Command)
def show_hook(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="A hook's name, its class, or the class path of one of yours.",
            metavar="NAME",
            autocompletion=_complete,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show one hook: its purpose, options, events and cost, and an example to paste.

    Example: **hookline hooks show gradient_monitor**

    Of your own, from the folder it is in: **hookline hooks show hooks.MyHook**
    """
    with interrupted_afterwards():
        from hookline.cli.hook_facts import facts_of
        from hookline.config import find_hook

    sys.path.insert(0, str(Path.cwd()))  # class paths begin in this folder, as in a training's file
    facts = facts_of(find_hook(name))
    if as_json or context.obj:
        print(_json(facts))
    else:
        _show(_as_text(facts))


def events(as_json: Json = False) -> None:
    """List all events: when each comes, what it is also called, and what hooks may ask for.

    Example: **hookline events**
    """
    from hookline.events import COMMON, EVENTS, LOOP_MAP, Argument

    def arguments(given: Iterable[Argument]) -> list[dict[str, Any]]:
        return [{"name": a.name, "aliases": list(a.aliases), "meaning": a.doc} for a in given]

    listed: list[dict[str, Any]] = [
        {
            "name": event.name,
            "aliases": list(event.aliases),
            "when": event.doc,
            "arguments": arguments(event.own),
        }
        for event in EVENTS.values()
    ]
    common = arguments(COMMON)
    if as_json:
        print(_json({"events": listed, "common": common, "loop": LOOP_MAP}))
        return
    lines = ["The loop", "", textwrap.indent(LOOP_MAP.rstrip(), "  "), "", "Events", ""]
    for one in listed:
        lines += [f"  {_with_aliases(one)}", f"      {one['when']}"]
        if one["arguments"]:
            asks = ", ".join(_with_aliases(a) for a in one["arguments"])
            lines.append(_wrapped(f"its own: {asks}", "      "))
    lines += ["", "Every event also has", "", _columns((a["name"], a["meaning"]) for a in common)]
    lines += ["", "A hook gets what its method's parameters name, such as"]
    lines += ["    def on_step_end(self, step, loss): …"]
    _show("\n".join(lines))


# -- listing --------------------------------------------------------------------------------------


def _list_hooks(as_json: bool) -> None:
    with interrupted_afterwards():
        from hookline.cli.hook_facts import GROUPS, group_of
        from hookline.config import known_hooks

    groups: dict[str, list[dict[str, Any]]] = {title: [] for title in GROUPS.values()}
    for known in known_hooks().values():
        groups.setdefault(group_of(known), []).append(_entry(known))
    listed = [{"group": group, **one} for group, ones in groups.items() for one in ones]
    if as_json:
        print(_json(listed))
        return
    widths = [max(len(one[key]) for one in listed) for key in ("name", "kind")]
    blocks: list[str] = []
    for group, ones in groups.items():
        rows = [(one["name"], one["kind"], one["problem"] or one["purpose"]) for one in ones]
        blocks.append(f"{group}\n{_columns(rows, widths)}\n")
    _show("\n".join(blocks))
    print("Options, events, cost and an example: hookline hooks show NAME")
    for line in _conflicts():
        print(line)


def _entry(known: Any) -> dict[str, Any]:
    """One line of the list; a package whose hook cannot be loaded does not hide the others."""
    from hookline.cli.hook_facts import facts_of

    entry = {"name": known.name, "package": known.package, "class": known.path}
    try:
        facts = facts_of(known)
    except HooklineError as error:
        return {**entry, "kind": "?", "purpose": "", "problem": str(error)}
    return {**entry, "kind": facts["kind"], "purpose": facts["purpose"], "problem": None}


def _conflicts() -> list[str]:
    from hookline.config import known_hooks

    return [
        f"The name '{known.name.partition(':')[2]}' of the package {known.package} is taken: its "
        f"hook is '{known.name}'."
        for known in known_hooks().values()
        if known.name.startswith(f"{known.package}:")
    ]


# -- one hook -------------------------------------------------------------------------------------


def _as_text(facts: dict[str, Any]) -> str:
    blocks = [
        f"{facts['name']}: {facts['purpose']}",
        textwrap.indent(facts["text"], "  "),
        _columns(
            [
                ("kind", facts["kind"]),
                ("class", facts["class"]),
                ("package", facts["package"]),
                ("order", f"it comes {facts['order']}"),
                ("character", _character(facts)),
                ("cost", facts["cost"] or "not said"),
            ]
        ),
        "Options\n" + (_options(facts["options"]) or "  It has none."),
        "What it does, when\n" + (_events(facts["events"]) or "  It is on modules, not on events."),
        f"In Python\n{textwrap.indent(facts['python'], '  ')}",
        f"In a training's file\n{textwrap.indent(facts['yaml'], '  ')}",
    ]
    return "\n\n".join(block for block in blocks if block)


def _character(facts: dict[str, Any]) -> str:
    texts = []
    if facts["critical"]:
        texts.append("training depends on it: when it fails, training stops")
    if facts["intervenes"]:
        texts.append("it means to change training or validation")
    return "; ".join(texts) or "it only observes; when it fails, training goes on"


def _options(options: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for one in options:
        default = "needed" if one["required"] else f"default {one['default']!r}"
        lines.append(f"  {one['name']}: {one['type']} ({default})")
        if one["meaning"]:
            lines.append(_wrapped(one["meaning"], "      "))
    return "\n".join(lines)


def _events(events: list[dict[str, Any]]) -> str:
    return _columns((one["event"], ", ".join(one["asks"])) for one in events)


# -- text -----------------------------------------------------------------------------------------


def _with_aliases(one: dict[str, Any]) -> str:
    aliases = f" ({', '.join(one['aliases'])})" if one["aliases"] else ""
    return f"{one['name']}{aliases}"


def _wrapped(text: str, indent: str) -> str:
    width = min(_WIDTH, room() or _WIDTH)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)


def _columns(rows: Iterable[tuple[str, ...]], widths: list[int] | None = None) -> str:
    """Rows in columns, indented; the last column is as wide as it needs to be."""
    rows = list(rows)
    if widths is None:
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] if rows else []
    lines = []
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  " + "  ".join([*padded, last]).rstrip())
    return "\n".join(lines)


def _show(text: str) -> None:
    """Print it; headings are what is not indented."""
    show(text, {r"(?m)^\S.*$": "bold"})


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)
