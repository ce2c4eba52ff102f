"""The reference pages of built-in hooks: the facts of `hookline hooks show` as Markdown.

`tools/generate.py` writes one page for each kind of hook, and the table on the overview page.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from importlib import import_module
from typing import Any

import yaml

from hookline.cli.hook_facts import GROUPS, RANKS, describe_behaviour, describe_hook, group_hooks
from hookline.config.hook_names import BUILT_INS, PROBES, find_hook
from hookline.dispatch.binding import bind
from hookline.errors import HooklineError
from hookline.integrations.bare_loop.loop_checks import CALLS, calls_for, saves_checkpoints
from hookline.integrations.bare_loop.session import Session

ALL = {**BUILT_INS, **PROBES}
# The name and the title of each page, by the group of its hooks.
PAGES = {
    "monitoring": ("monitoring", "Monitoring hooks"),
    "optimization": ("steering", "Steering hooks"),
    "checkpointing": ("checkpointing", "Checkpointing hooks"),
    "debugging": ("debugging", "Debugging hooks"),
    "notification": ("notification", "Notification hooks"),
    "updates": ("updates", "Gradient updates"),
    "probes": ("probes", "Probes"),
}


def pages() -> dict[str, str]:
    """Return the text of each page, by its name."""
    groups = group_hooks(map(find_hook, ALL))
    return {
        name: _page(title, [describe_hook(known) for known in groups[GROUPS[group]]])
        for group, (name, title) in PAGES.items()
    }


def overview() -> str:
    """Return the list of all built-in hooks, by kind, with what a bare loop has to call."""
    groups = group_hooks(map(find_hook, ALL))
    lines: list[str] = []
    for group, (page, title) in PAGES.items():
        lines += [f"### {title}", ""]
        for known in groups[GROUPS[group]]:
            facts = describe_hook(known)
            kind = _class(facts)
            link = f"[{kind}](built_in/{page}.md#{kind.lower()})"
            lines.append(f"- {link}: {facts['purpose']} {_in_bare_loop(known.name)}".rstrip())
        lines.append("")
    return "\n".join(lines)


def _page(title: str, hooks: list[dict[str, Any]]) -> str:
    """Return one page: an example, what most of its hooks have in common, a section for each."""
    first = hooks[0]
    columns = zip(*map(_behaviour, hooks), strict=True)
    common = [Counter(column).most_common(1)[0][0] for column in columns]
    lines = [
        f"# {title}",
        "",
        "<!-- Written by `make generate` from the classes; edit there. -->",
        "",
        "Each is added in Python, or by its name in a [config file](../configuration.md#hooks):",
        "",
        "```python",
        re.sub(r"^import .*\n\n", "", first["python"]),
        "```",
        "",
        "```yaml",
        _entry(first["yaml"]),
        "```",
        "",
        f"If a section does not say otherwise: {' '.join(common)}",
        "",
    ]
    for facts in hooks:
        differing = [one for one in _behaviour(facts) if one not in common]
        lines += [
            f"## {_class(facts)}",
            "",
            f"`{facts['name']}`: {facts['purpose']}",
            "",
            *([facts["text"], ""] if facts["text"] else []),
            *_options(facts["options"]),
            *(["", " ".join(differing)] if differing else []),
            "",
            f"Cost: {facts['cost']}",
            "",
        ]
    return "\n".join(lines)


def _entry(example: str) -> str:
    """Return the only entry of a YAML example on one line."""
    ((hook,),) = yaml.safe_load(example)["hooks"].values()
    name = hook.pop("name")
    options = (f", {option}: {json.dumps(value)}" for option, value in hook.items())
    return f"- {{name: {name}{''.join(options)}}}"


def _behaviour(facts: dict[str, Any]) -> tuple[str, str, str]:
    place = f"It is called {facts['order']}."
    ranks = f"It runs in {RANKS[facts['ranks']]}."
    return place, ranks, describe_behaviour(facts)


def _in_bare_loop(name: str) -> str:
    """Return what a bare loop has to call for this hook; "" if it may stay unchanged."""
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
        return "Only with the trainer."
    calls = [re.findall(r"`(?:with )?(.+?):?`", CALLS[need])[0] for need in sorted(needs)]
    return f"A bare loop calls {', '.join(f'`{call}`' for call in calls)}." if calls else ""


def _class(facts: dict[str, Any]) -> str:
    return str(facts["class"].rpartition(".")[2])


def _options(options: list[dict[str, Any]]) -> list[str]:
    """Return the options as a list, each with its default and type; every hook has a name."""
    shown = [_option(option) for option in options if option["name"] != "name"]
    return shown or ["It has no options."]


def _option(option: dict[str, Any]) -> str:
    if option["required"]:
        return f"- `{option['name']}` (`{option['type']}`, required): {option['meaning']}"
    shown = f"{option['name']} = {option['default']!r}"
    if option["type"] == "bool":
        return f"- `{shown}`: {option['meaning']}"
    return f"- `{shown}` (`{option['type']}`): {option['meaning']}"
