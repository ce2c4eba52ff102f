"""The description of a hook class: purpose, options, events, cost, examples."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import hookline
import hookline.probes
from hookline.config.hook_items import SECTIONS
from hookline.config.hook_names import KnownHook, load_hook_class
from hookline.dispatch.binding import bind
from hookline.errors import HooklineError
from hookline.events import EVENTS, FLOWS
from hookline.hook import HookGroup
from hookline.options import Option, get_options
from hookline.runs.jsonable import to_jsonable

GROUPS = {
    "monitoring": "Monitor training",
    "optimization": "Control training",
    "checkpointing": "Save checkpoints and results",
    "debugging": "Find errors",
    "lint": "Find errors",
    "notification": "Send notifications",
    "updates": "Transform gradients",
    "probes": "Observe or edit the model's activations",
}
_EXAMPLES: Mapping[str, Mapping[str, Any]] = {  # where the defaults are not a good example
    "notification": {"webhook_url": "https://hooks.example.com/training"},
    "upload": {"destination": "/backup/runs"},
    "time_limit": {"limit": "11:30:00"},
    "scale": {"factor": 0.5},
    "mask": {"patterns": ["embedding"]},
    "clip_norm": {"max_norm": 1.0},
    "clip_value": {"max_value": 0.1},
    "capture": {"modules": "blocks.*", "input": False},
    "monitor": {"modules": "blocks.*", "metrics": ["mean", "std"]},
    "edit": {
        "modules": "blocks.3",
        "operation": "scale",
        "value": 0.5,
        "enable_intervention": True,
    },
}
_EVERY = {"capture": 100, "monitor": 100}  # the schedule that an example shows
_PLACES = {
    HookGroup.USER: "in the order of its registration",
    HookGroup.MONITOR: "with the monitors, before hooks that control training",
    HookGroup.CONTROL: "after the monitors, before hooks that save checkpoints",
    HookGroup.CHECKPOINT: "after hooks that control training, before the writers",
    HookGroup.WRITER: "with the writers, after most others",
}
RANKS = {
    "all": "every process",
    "main": "rank 0 only",
    "local_main": "the first process of each node",
}
_INTERNAL_ARGUMENTS = {"observation"}  # not declared by the hook itself


def group_hooks(hooks: Iterable[KnownHook]) -> dict[str, list[KnownHook]]:
    """Return hooks by the title of their group."""
    groups: dict[str, list[KnownHook]] = {title: [] for title in GROUPS.values()}
    for hook in hooks:
        groups.setdefault(_group_title(hook), []).append(hook)
    return groups


def _group_title(known: KnownHook) -> str:
    parts = known.path.split(".")
    return GROUPS[parts[2] if parts[1] == "hooks" else parts[1]]


def describe_hook(known: KnownHook) -> dict[str, Any]:
    """Return the description of a hook as plain values; raise `ConfigError` if it is not a hook."""
    kind: Any = load_hook_class(known.name)
    purpose, text = _prose(inspect.getdoc(kind) or "")
    shown = _shown_options(known.name, kind)
    return {
        "name": known.name,
        "kind": kind.hookline_kind,
        "class": known.path,
        "purpose": purpose,
        "text": text,
        "options": [_option(one) for one in get_options(kind).values()],
        "events": _events(kind),
        "order": _PLACES[_group(kind)],
        "ranks": kind.ranks,
        "critical": bool(kind.critical),
        "intervenes": bool(kind.intervenes),
        "cost": kind.hookline_cost,
        "python": _python(kind, shown, _EVERY.get(known.name)),
        "yaml": _yaml(known.name, kind, shown, _EVERY.get(known.name)),
    }


def describe_behaviour(facts: Mapping[str, Any]) -> str:
    """Return how a hook affects training and what its failure means, from its description."""
    sentences: list[str] = []
    if facts["critical"]:
        sentences.append("Training depends on it: if it fails, training stops.")
    if facts["intervenes"]:
        sentences.append("It changes training or validation.")
    return " ".join(sentences) or "It only observes; if it fails, training continues."


def _group(kind: Any) -> HookGroup:
    """Return the group; forward hooks and updates keep the order of their registration."""
    return HookGroup.USER if kind.hookline_kind in FLOWS else kind.hookline_group


def _prose(doc: str) -> tuple[str, str]:
    """Return the first paragraph of a docstring, and the rest up to its sections."""
    first, _, rest = doc.partition("\n\n")
    rest = re.split(r"^(?:Args|Attributes|Raises|Example|Examples):\n", rest, flags=re.MULTILINE)[0]
    return " ".join(first.split()), textwrap.dedent(rest).strip()


def _option(one: Option) -> dict[str, Any]:
    return {
        "name": one.name,
        "type": _readable(one.type),
        "required": one.required,
        "default": None if one.required else to_jsonable(one.default),
        "meaning": one.text,
    }


def _readable(annotation: str) -> str:
    """Return a type in short form: `Annotated[float, Field(ge=0)]` becomes `float ≥ 0`."""
    text = re.sub(r"\bPositive(Int|Float)\b", lambda found: f"{found[1].lower()} > 0", annotation)
    text = re.sub(r"\bNonNegative(Int|Float)\b", lambda found: f"{found[1].lower()} ≥ 0", text)
    for word, sign in {"ge=": "≥ ", "gt=": "> ", "le=": "≤ ", "lt=": "< "}.items():
        text = text.replace(word, sign)
    return re.sub(r"Annotated\[(.+?), Field\(([^()]*)\)\]", r"\1 \2", text)


def _events(kind: Any) -> list[dict[str, Any]]:
    try:
        bindings = bind(object.__new__(kind))
    except HooklineError as error:  # the error that registering it would raise
        raise hookline.ConfigError(str(error)) from error
    return [
        {"event": event, "asks": sorted(bindings[event].required - _INTERNAL_ARGUMENTS)}
        for event in (*EVENTS, *FLOWS)
        if event in bindings
    ]


# -- examples -------------------------------------------------------------------------------------


def _shown_options(name: str, kind: Any) -> dict[str, Any]:
    """Return the options of an example: the required ones, filled up to two."""
    shown = dict(_EXAMPLES.get(name, {}))
    for one in get_options(kind).values():
        if one.required and one.name not in shown:
            shown[one.name] = _placeholder(one.type)
    for one in get_options(kind).values():
        if len(shown) < 2 and isinstance(one.default, bool | int | float | str):
            shown.setdefault(one.name, one.default)
    return shown


def _placeholder(annotation: str) -> Any:
    """Return a placeholder of this type."""
    samples = {"bool": True, "int": 1, "Int": 1, "float": 1.0, "Float": 1.0, "list": [], "dict": {}}
    return next((value for word, value in samples.items() if word in annotation), "…")


def _python(kind: Any, options: Mapping[str, Any], every: int | None) -> str:
    name = kind.__name__
    call = f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
    call += "" if every is None else f", every={every}"
    for place, module in (("hookline", hookline), ("hookline.probes", hookline.probes)):
        if getattr(module, name, None) is kind:
            return f"import {place}\n\ntrainer.add_hook({place}.{call})"
    return f"from {kind.__module__} import {name}\n\ntrainer.add_hook({call})"


def _yaml(name: str, kind: Any, options: Mapping[str, Any], every: int | None) -> str:
    section = next(one for one, of in SECTIONS.items() if of == kind.hookline_kind)
    lines = ["hooks:", f"  {section}:", f"    - name: {name}"]
    lines += [f"      {key}: {json.dumps(value)}" for key, value in options.items()]
    lines += [] if every is None else [f"      every: {every}"]
    return "\n".join(lines)
