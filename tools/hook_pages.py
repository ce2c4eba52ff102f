"""The reference pages of built-in hooks: the output of `hookline hooks show` as Markdown.

`tools/generate.py` writes one page for each hook, and the table on the overview page.
"""

from __future__ import annotations

from typing import Any

from hookline.cli.hook_facts import describe_behaviour, describe_hook, group_hooks
from hookline.config.hook_names import BUILT_INS, PROBES, find_hook

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
        f"Order: {facts['order']}. {describe_behaviour(facts)}",
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
