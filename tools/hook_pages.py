"""The reference pages of built-in hooks, made from their classes.

`tools/generate.py` writes them: one page for each hook, and the table on the overview.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from hookline.dispatch.binding import bind
from hookline.events import EVENTS, FLOWS
from hookline.hook import Rank
from hookline.options import Option, options_of
from hookline.registry import load_hook_class
from hookline.registry.names import BUILT_INS, PROBES

GROUPS = {
    "monitoring": "See how training goes",
    "optimization": "Steer training",
    "checkpointing": "Keep what training made",
    "debugging": "Find out what goes wrong",
    "integration": "Tell others",
    "updates": "Transform gradients",
    "probes": "See and shape what flows through modules",
}
ALL = {**BUILT_INS, **PROBES}
SAMPLES = {  # values for what has no default
    "webhook_url": '"https://…"',
    "destination": '"s3://bucket/runs"',
    "limit": '"11:30:00"',
    "factor": "0.5",
    "modules": '"blocks.*"',
    "patterns": '["embedding"]',
    "max_norm": "1.0",
    "max_value": "0.1",
}
RANKS = {
    Rank.USER: "in the order of its registration",
    Rank.MONITOR: "with the monitors, before what decides",
    Rank.CONTROL: "after the monitors, before what saves",
    Rank.CHECKPOINT: "after what decides, before the writers",
    Rank.WRITER: "last, with the writers",
    Rank.DEFAULT: "after all others",
}
FIELDS = {
    "logging": "enable_logging_hook",
    "gradient_monitor": "enable_gradient_monitor",
    "model_checkpoint": "enable_model_checkpoint_hook",
    "early_stopping": "enable_early_stopping_hook",
    "lr_monitor": "enable_lr_monitor",
}


def page(name: str) -> str:
    """The page of one built-in."""
    kind: Any = load_hook_class(name)
    purpose, text = _prose(inspect.getdoc(kind) or "")
    given = ", ".join(
        f"{one.name}={SAMPLES[one.name]}" for one in options_of(kind).values() if _needed(one)
    )
    lines = [
        f"# {kind.__name__}",
        "",
        f"<!-- Written by `make generate` from {kind.__module__}; edit there. -->",
        "",
        purpose,
        "",
        *([text, ""] if text else []),
        "```python",
        f"trainer.add_hook({_call(name, kind, given)})",
        "```",
        "",
        f"Its name in a run is `{name}`. {_by_configuration(name)}",
        "",
        "## Options",
        "",
        *_options(kind),
        "",
        "## What it does, when",
        "",
        "| when | asks for |",
        "|---|---|",
        *_events(kind),
        "",
        f"It comes {RANKS[kind.hookline_rank]}. {_character(kind)}",
        "",
        "## Cost",
        "",
        str(kind.hookline_cost),
        "",
    ]
    return "\n".join(lines)


def _call(name: str, kind: Any, given: str) -> str:
    if name not in PROBES:
        return f"hookline.{kind.__name__}({given})"
    made = '.ablate("blocks.1", enable_intervention=True)' if name == "edit" else '("blocks.*")'
    return f"hookline.probes.{kind.__name__}{made}"


def overview() -> str:
    """The table of all built-ins, by what they are for."""
    lines: list[str] = []
    for group, title in GROUPS.items():
        lines += [f"**{title}**", "", "| hook | name | what it does |", "|---|---|---|"]
        for name, path in ALL.items():
            if path.split(".")[-3] == group:
                kind = load_hook_class(name)
                purpose = _prose(inspect.getdoc(kind) or "")[0]
                lines.append(f"| [{kind.__name__}](built_in/{name}.md) | `{name}` | {purpose} |")
        lines.append("")
    return "\n".join(lines)


def _prose(doc: str) -> tuple[str, str]:
    """The first sentence of a docstring, and the rest up to its sections."""
    first, _, rest = doc.partition("\n\n")
    for section in ("Args:\n", "Attributes:\n", "Raises:\n"):
        rest = rest.partition(section)[0]
    return " ".join(first.split()), textwrap.dedent(rest).strip()


def _needed(option: Option) -> bool:
    return option.required or option.name in ("webhook_url", "destination", "limit")


def _options(kind: Any) -> list[str]:
    options = options_of(kind).values()
    if not options:
        return ["It has none."]
    head = ["| option | type | default | meaning |", "|---|---|---|---|"]
    return [*head, *(_row(one) for one in options)]


def _row(one: Option) -> str:
    default = "" if one.required else f"`{one.default!r}`"
    kind = _plain(one.type).replace("|", "\\|")
    return f"| `{one.name}` | `{kind}` | {default} | {one.text} |"


def _plain(annotation: str) -> str:
    """A type as a reader understands it: `Annotated[float, Field(ge=0)]` is `float ≥ 0`."""
    text = re.sub(r"\bPositive(Int|Float)\b", lambda found: f"{found[1].lower()} > 0", annotation)
    text = re.sub(r"\bNonNegative(Int|Float)\b", lambda found: f"{found[1].lower()} ≥ 0", text)
    for word, sign in {"ge=": "≥ ", "gt=": "> ", "le=": "≤ ", "lt=": "< "}.items():
        text = text.replace(word, sign)
    return re.sub(r"Annotated\[(.+?), Field\(([^()]*)\)\]", r"\1 \2", text)


def _events(kind: Any) -> list[str]:
    bindings = bind(kind.__new__(kind))
    carriers = {"observation"}  # how it is called, nothing that it asks for
    asks = {
        event: sorted(bindings[event].asks - carriers)
        for event in (*EVENTS, *FLOWS)
        if event in bindings
    }
    return [
        f"| `{event}` | {', '.join(f'`{ask}`' for ask in names) or 'nothing'} |"
        for event, names in asks.items()
    ]


def _by_configuration(name: str) -> str:
    field = FIELDS.get(name)
    if field is None:
        return f'By configuration: `HooksConfig(hook_classes=["{name}"])`.'
    return f"By configuration: `HooksConfig({field}=True)`."


def _character(kind: Any) -> str:
    texts = []
    if kind.critical:
        texts.append("Training depends on it: when it fails, training stops.")
    if kind.intervenes:
        texts.append("It means to change training or validation.")
    return " ".join(texts) or "It only observes; when it fails, training goes on."
