"""The keys of the config file reference, generated from the models of a config file.

`tools/generate.py` writes them between the markers in docs/configuration_reference.md.
"""

from __future__ import annotations

import json
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hookline.config_files.json_schema import REGISTRATION_KEYS
from hookline.config_files.sections import (
    DataConfig,
    GroupConfig,
    HookConfig,
    HooksByKind,
    LoaderConfig,
    ObjectConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrackerConfig,
    TrainingConfig,
)

SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("File", TrainingConfig),
    ("Object", ObjectConfig),
    ("Optimizer", OptimizerConfig),
    ("Parameter group", GroupConfig),
    ("Scheduler", SchedulerConfig),
    ("Tracker", TrackerConfig),
    ("Data", DataConfig),
    ("Loader", LoaderConfig),
    ("Hooks by kind", HooksByKind),
    ("Hook", HookConfig),
)
NAMES = {
    "ObjectConfig": "object",
    "OptimizerConfig": "optimizer",
    "GroupConfig": "group",
    "SchedulerConfig": "scheduler",
    "TrackerConfig": "tracker",
    "DataConfig": "see below",
    "LoaderConfig": "loader",
    "HooksByKind": "by kind",
    "HookConfig": "hook",
    "TrainerConfig": "[the fields of the trainer](trainer_config.md)",
}
PLAIN = {int: "integer", float: "number", bool: "boolean", str: "string", Any: "any value"}


def tables() -> str:
    """Return the keys of each model, with a sentence about it."""
    lines: list[str] = []
    for title, model in SECTIONS:
        purpose = " ".join((model.__doc__ or "").split())
        lines += [f"## {title}", "", purpose, ""]
        inherited = {name for base in model.__mro__[1:] for name in _own(base)}
        shown = {n: f for n, f in model.model_fields.items() if n not in inherited}
        lines += [_row(field.alias or name, field) for name, field in shown.items()]
        if inherited and model is not ObjectConfig:
            lines.append("- and the keys of [an object](#object)")
        if model is HookConfig:
            lines += [
                f"- `{key}` ({schema['type']}): {schema['description']}"
                for key, schema in REGISTRATION_KEYS.items()
            ]
            lines.append("- any other: an option of the hook")
        if model is TrackerConfig:
            lines.append("- any other: an option of the tracker")
        if model is GroupConfig:
            lines.append("- any other: an option of the optimizer, such as `lr`")
        lines.append("")
    return "\n".join(lines)


def _own(base: type) -> set[str]:
    return set(base.model_fields) if issubclass(base, BaseModel) else set()


def _row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else _default(field)
    return f"- `{name}` ({_values(field.annotation)}; {default}): {field.description}"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{json.dumps(value)}`"


def _values(annotation: Any) -> str:
    """Return the valid values of a key, as text."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(inside[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin in (Union, UnionType):
        return ", ".join(dict.fromkeys(_values(member) for member in inside))
    if annotation is NoneType:
        return "null"
    if origin is list:
        return f"list of {_values(inside[0])}"
    if origin is dict:
        return f"mapping to {_values(inside[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return NAMES[annotation.__name__]
    return PLAIN[annotation]


if __name__ == "__main__":
    print(tables())
