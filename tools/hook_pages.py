"""The reference pages of built-in hooks: what `hookline hooks show` says, as Markdown.

`tools/generate.py` writes them: one page for each hook, and the table on the overview.
"""

from __future__ import annotations

from typing import Any

from hookline.cli.hook_facts import GROUPS, facts_of, group_of
from hookline.config.hook_names import BUILT_INS, PROBES, find_hook

ALL = {**BUILT_INS, **PROBES}


def page(name: str) -> str:
    """The page of one built-in."""
    facts = facts_of(find_hook(name))
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
        f"Its name in a run is `{name}`. In a [training file](../configuration.md):",
        "",
        "```yaml",
        facts["yaml"],
        "```",
        "",
        "## Options",
        "",
        *_options(facts["options"]),
        "",
        "## What it does, when",
        "",
        "| when | asks for |",
        "|---|---|",
        *(f"| `{one['event']}` | {_asks(one['asks'])} |" for one in facts["events"]),
        "",
        f"It comes {facts['order']}. {_character(facts)}",
        "",
        "## Cost",
        "",
        str(facts["cost"]),
        "",
    ]
    return "\n".join(lines)


def overview() -> str:
    """The table of all built-ins, by what they are for."""
    lines: list[str] = []
    for title in GROUPS.values():
        lines += [f"**{title}**", "", "| hook | name | what it does |", "|---|---|---|"]
        for known in map(find_hook, ALL):
            if group_of(known) == title:
                facts = facts_of(known)
                link = f"[{_class(facts)[0]}](built_in/{known.name}.md)"
                lines.append(f"| {link} | `{known.name}` | {facts['purpose']} |")
        lines.append("")
    return "\n".join(lines)


def _class(facts: dict[str, Any]) -> tuple[str, str]:
    module, _, name = facts["class"].rpartition(".")
    return name, module


def _options(options: list[dict[str, Any]]) -> list[str]:
    if not options:
        return ["It has none."]
    head = ["| option | type | default | meaning |", "|---|---|---|---|"]
    return [*head, *(_row(one) for one in options)]


def _row(one: dict[str, Any]) -> str:
    default = "" if one["required"] else f"`{one['default']!r}`"
    kind = one["type"].replace("|", "\\|")
    return f"| `{one['name']}` | `{kind}` | {default} | {one['meaning']} |"


def _asks(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _character(facts: dict[str, Any]) -> str:
    texts: list[str] = []
    if facts["critical"]:
        texts.append("Training depends on it: when it fails, training stops.")
    if facts["intervenes"]:
        texts.append("It means to change training or validation.")
    return " ".join(texts) or "It only observes; when it fails, training goes on."
