"""The reference pages of built-in hooks: the output of `hookline hooks show` as Markdown.

`tools/generate.py` writes one page for each hook, and the table on the overview page.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

from hookline.cli.hook_facts import RANKS, describe_behaviour, describe_hook, group_hooks
from hookline.config.hook_names import BUILT_INS, PROBES, find_hook
from hookline.dispatch.binding import bind
from hookline.errors import HooklineError
from hookline.integrations.bare_loop.loop_checks import CALLS, calls_for, saves_checkpoints
from hookline.integrations.bare_loop.session import Session

ALL = {**BUILT_INS, **PROBES}


def page(name: str) -> str:
    """Return the page of one built-in hook."""
    facts = describe_hook(find_hook(name))
    kind, module = _class(facts)
    lines = [
        f"# {kind}",
        "",
        f"<!-- Written by `make generate` from {module}; edit there. -->",
        "",
        facts["purpose"],
        "",
        *([facts["text"], ""] if facts["text"] else []),
        "```python",
        facts["python"],
        "```",
        "",
        f"The name of the hook is `{name}`. In a [config file](../configuration.md):",
        "",
        "```yaml",
        facts["yaml"],
        "```",
        "",
        "## Options",
        "",
        *_options(facts["options"]),
        "",
        "## Events",
        "",
        "| event | arguments |",
        "|---|---|",
        *(f"| `{event['event']}` | {_asks(event['asks'])} |" for event in facts["events"]),
        "",
        f"Order: {facts['order']}. Of several processes, it runs in {RANKS[facts['ranks']]}. "
        + describe_behaviour(facts),
        "",
        "## Cost",
        "",
        str(facts["cost"]),
        "",
    ]
    return "\n".join(lines)


def overview() -> str:
    """Return the tables of all built-in hooks, by purpose."""
    lines: list[str] = []
    for title, hooks in group_hooks(map(find_hook, ALL)).items():
        lines += [f"**{title}**", "", "| hook | name | purpose |", "|---|---|---|"]
        for known in hooks:
            facts = describe_hook(known)
            link = f"[{_class(facts)[0]}](built_in/{known.name}.md)"
            lines.append(f"| {link} | `{known.name}` | {facts['purpose']} |")
        lines.append("")
    return "\n".join(lines)


def loops_page() -> str:
    """Return the page that says which built-in hook works in which loop."""
    lines = [
        "# Built-in hooks and loops",
        "",
        "<!-- Written by `make generate` from the events and arguments of the hooks. -->",
        "",
        "All built-in hooks work with the [trainer](trainer.md). A [bare loop](bare_loop.md) that",
        "stays unchanged provides what most of them need. Others need calls on the",
        "[session](session.md). The table shows each hook with its default options;",
        "`ModelCheckpoint(every_n_steps=…)`, for example, works in an unchanged loop.",
        "",
        "| hook | trainer | bare loop |",
        "|---|---|---|",
    ]
    lines += [f"| [{name}](built_in/{name}.md) | yes | {_in_bare_loop(name)} |" for name in ALL]
    return "\n".join([*lines, ""])


def _in_bare_loop(name: str) -> str:
    module, _, class_name = find_hook(name).path.rpartition(".")
    kind = getattr(import_module(module), class_name)
    try:
        hook = kind()
    except (TypeError, HooklineError):  # it has required options
        hook = object.__new__(kind)
    needs: set[str] = set()
    for event, binding in bind(hook).items():
        if event not in kind.hookline_optional_events:
            needs |= calls_for(event, binding.required)
    if saves_checkpoints(hook):
        needs -= {"checkpoint", "resumed"}  # it causes these events itself
    source = inspect.getsource(kind)
    missing = sorted(
        f"`trainer.{attribute}`"
        for attribute in set(re.findall(r"trainer\.(\w+)\(", source))
        if not hasattr(Session, attribute) and f'hasattr(trainer, "{attribute}")' not in source
    )
    if missing:
        return f"no: it calls {', '.join(missing)}"
    calls = [re.findall(r"`(.+?)`", CALLS[need])[0] for need in sorted(needs)]
    return f"with {', '.join(f'`{call}`' for call in calls)}" if calls else "yes"


def _class(facts: dict[str, Any]) -> tuple[str, str]:
    module, _, name = facts["class"].rpartition(".")
    return name, module


def _options(options: list[dict[str, Any]]) -> list[str]:
    if not options:
        return ["None."]
    head = ["| option | type | default | meaning |", "|---|---|---|---|"]
    return [*head, *(_row(option) for option in options)]


def _row(option: dict[str, Any]) -> str:
    default = "" if option["required"] else f"`{option['default']!r}`"
    kind = option["type"].replace("|", "\\|")
    return f"| `{option['name']}` | `{kind}` | {default} | {option['meaning']} |"


def _asks(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
