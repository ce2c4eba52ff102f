"""The reference pages of built-in hooks: the output of `hookline hooks show` as Markdown.

`tools/generate.py` writes them: one page for each hook, and the table on the overview.
"""

from __future__ import annotations

from typing import Any

from hookline.cli.hook_facts import GROUPS, facts_of, group_of
from hookline.config.hook_names import BUILT_INS, PROBES, where_is

ALL = {**BUILT_INS, **PROBES}


def page(name: str) -> str:
    """Return the page of one built-in hook."""
    facts = facts_of(where_is(name))
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
        f"Order: {facts['order']}. {_character(facts)}",
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
    for title in GROUPS.values():
        lines += [f"**{title}**", "", "| hook | name | what it does |", "|---|---|---|"]
        for known in map(where_is, ALL):
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
        return ["None."]
    head = ["| option | type | default | meaning |", "|---|---|---|---|"]
    return [*head, *(_row(option) for option in options)]


def _row(option: dict[str, Any]) -> str:
    default = "" if option["required"] else f"`{option['default']!r}`"
    kind = option["type"].replace("|", "\\|")
    return f"| `{option['name']}` | `{kind}` | {default} | {option['meaning']} |"


def _asks(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _character(facts: dict[str, Any]) -> str:
    texts: list[str] = []
    if facts["critical"]:
        texts.append("If it fails, training stops.")
    if facts["intervenes"]:
        texts.append("It changes training or validation.")
    return " ".join(texts) or "It only observes. If it fails, training continues."
