"""`hookline hooks` and `hookline events`: the available hooks, and the events that call them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from hookline.cli.command_base import Json, new_group
from hookline.cli.text_output import print_json, print_line, show, terminal_width
from hookline.errors import HooklineError
from hookline.interrupts import HeldInterrupts
from hookline.printable import printable
from hookline.text_tables import format_table

_WIDTH = 100

hooks_app = new_group("hooks")


def _complete(incomplete: str) -> list[str]:
    """Return the names that start with a text, for shell completion; torch is not imported."""
    from hookline.config.hook_names import known_hooks

    return [name for name in known_hooks() if name.startswith(incomplete)]


@hooks_app.callback(invoke_without_command=True)
def hooks(context: typer.Context, as_json: Json = False) -> None:
    """List all built-in hooks.

    The kinds: a **loop** hook is called by events, a **forward** hook receives the model's output,
    an **update** transforms gradients, a **probe** is attached to modules of the model.

    Example: **hookline hooks**, and then **hookline hooks show early_stopping**
    """
    context.obj = as_json
    if context.invoked_subcommand is None:
        _list_hooks(as_json)


@hooks_app.command("show")
def show_hook(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="The name of a hook, its class, or the class path of your own hook.",
            metavar="NAME",
            autocompletion=_complete,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show one hook: its purpose, options, events and cost, and an example.

    Example: **hookline hooks show gradient_monitor**

    For your own hook, in the folder of its module: **hookline hooks show hooks.MyHook**
    """
    with HeldInterrupts():
        from hookline.cli.hook_facts import describe_hook
        from hookline.config.hook_names import find_hook

    sys.path.insert(0, str(Path.cwd()))  # class paths start in this folder, as in a config file
    facts = describe_hook(find_hook(name))
    if as_json or context.obj:
        print_json(facts)
    else:
        _show(_as_text(facts))


def events() -> None:
    """List all events: when each occurs, its aliases, and the arguments that hooks may declare.

    Example: **hookline events**
    """
    from hookline.events import COMMON, EVENTS, LOOP_MAP

    lines = ["The loop", "", textwrap.indent(LOOP_MAP.rstrip(), "  "), "", "Events", ""]
    for event in EVENTS.values():
        lines += [f"  {_with_aliases(event)}", f"      {event.doc}"]
        if event.own:
            own = ", ".join(map(_with_aliases, event.own))
            lines.append(_wrapped(f"own arguments: {own}", "      "))
    lines += ["", "Every event also has", "", _columns((one.name, one.doc) for one in COMMON)]
    lines += ["", "A hook receives the arguments that its method declares, such as"]
    lines += ["    def on_step_end(self, step, loss): …"]
    _show("\n".join(lines))


# -- listing --------------------------------------------------------------------------------------


def _list_hooks(as_json: bool) -> None:
    with HeldInterrupts():
        from hookline.cli.hook_facts import group_hooks
        from hookline.config.hook_names import known_hooks

    by_title = group_hooks(known_hooks().values())
    groups = {title: [_entry(hook) for hook in hooks] for title, hooks in by_title.items()}
    listed = [{"group": group, **one} for group, ones in groups.items() for one in ones]
    if as_json:
        print_json(listed)
        return
    blocks: list[str] = []
    for group, ones in groups.items():
        rows = [(one["name"], one["kind"], one["problem"] or one["purpose"]) for one in ones]
        blocks.append(f"{printable(group)}\n{_columns(rows)}\n")
    _show("\n".join(blocks))
    print_line("For options, events, cost and an example: hookline hooks show NAME")


def _entry(known: Any) -> dict[str, Any]:
    """Return one line of the list; a hook that cannot be loaded has a problem instead."""
    from hookline.cli.hook_facts import describe_hook

    entry = {"name": known.name, "class": known.path}
    try:
        facts = describe_hook(known)
    except HooklineError as error:
        return {**entry, "kind": "?", "purpose": "", "problem": str(error)}
    return {**entry, "kind": facts["kind"], "purpose": facts["purpose"], "problem": None}


# -- one hook -------------------------------------------------------------------------------------


def _as_text(facts: dict[str, Any]) -> str:
    from hookline.cli.hook_facts import RANKS, describe_behaviour

    asked = [(one["event"], ", ".join(one["asks"])) for one in facts["events"]]
    events = _columns(asked) if asked else "  None: it is attached to modules."
    blocks = [
        printable(f"{facts['name']}: {facts['purpose']}", 1000),
        textwrap.indent(facts["text"], "  "),
        _columns(
            [
                ("kind", facts["kind"]),
                ("class", facts["class"]),
                ("order", f"called {facts['order']}"),
                ("ranks", f"called in {RANKS[facts['ranks']]}"),
                ("behaviour", describe_behaviour(facts)),
                ("cost", facts["cost"] or "not documented"),
            ]
        ),
        "Options\n" + (_options(facts["options"]) or "  The hook has no options."),
        f"Events and their arguments\n{events}",
        f"In Python\n{textwrap.indent(facts['python'], '  ')}",
        f"In a config file\n{textwrap.indent(facts['yaml'], '  ')}",
    ]
    return "\n\n".join(block for block in blocks if block)


def _options(options: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for one in options:
        default = "required" if one["required"] else f"default {one['default']!r}"
        lines.append(f"  {one['name']}: {one['type']} ({printable(default)})")
        if one["meaning"]:
            lines.append(_wrapped(one["meaning"], "      "))
    return "\n".join(lines)


# -- text -----------------------------------------------------------------------------------------


def _with_aliases(one: Any) -> str:
    """Return an event or argument with its other names."""
    return f"{one.name} ({', '.join(one.aliases)})" if one.aliases else one.name


def _wrapped(text: str, indent: str) -> str:
    width = min(_WIDTH, terminal_width() or _WIDTH)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)


def _columns(rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows as indented columns."""
    first, *others = rows
    return textwrap.indent(format_table(first, others), "  ")


def _show(text: str) -> None:
    """Print a text whose headings are the lines without indentation."""
    show(text, {r"(?m)^\S.*$": "bold"})
