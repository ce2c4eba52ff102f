"""The tables of the configuration page, generated from the models of a config file.

`tools/generate.py` writes them between the markers in docs/configuration.md.
"""

from __future__ import annotations

import json
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hookline.config_files.file_model import (
    DataConfig,
    GroupConfig,
    HookConfig,
    HooksByKind,
    LoaderConfig,
    ObjectConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainingConfig,
)
from hookline.config_files.json_schema import REGISTRATION_KEYS

SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", TrainingConfig),
    ("An object", ObjectConfig),
    ("An optimizer", OptimizerConfig),
    ("A parameter group", GroupConfig),
    ("A scheduler", SchedulerConfig),
    ("`data`", DataConfig),
    ("A loader", LoaderConfig),
    ("`hooks`, by kind", HooksByKind),
    ("A hook", HookConfig),
)
NAMES = {
    "ObjectConfig": "an object",
    "OptimizerConfig": "an optimizer",
    "GroupConfig": "a parameter group",
    "SchedulerConfig": "a scheduler",
    "DataConfig": "see below",
    "LoaderConfig": "a loader",
    "HooksByKind": "by kind",
    "HookConfig": "a hook",
    "TrainerConfig": "[the trainer's fields](trainer.md)",
}
PLAIN = {int: "whole number", float: "number", bool: "true, false", str: "string", Any: "anything"}


def tables() -> str:
    """Return a table for each model, with a sentence about it."""
    lines: list[str] = []
    for title, model in SECTIONS:
        purpose = " ".join((model.__doc__ or "").split())
        purpose = purpose.removeprefix(title).removeprefix(". ").removeprefix(": ")
        lines += [
            f"**{title}.** {purpose[0].upper()}{purpose[1:]}",
            "",
            "| key | values | default | meaning |",
        ]
        lines += ["|---|---|---|---|"]
        inherited = {name for base in model.__mro__[1:] for name in _own(base)}
        shown = {n: f for n, f in model.model_fields.items() if n not in inherited}
        lines += [_row(field.alias or name, field) for name, field in shown.items()]
        if inherited and model is not ObjectConfig:
            lines.append("| | | | also the keys of an object |")
        if model is HookConfig:
            lines += [
                f"| `{n}` | {one['type']} | | {one['description']} |"
                for n, one in REGISTRATION_KEYS.items()
            ]
            lines.append("| any other | | | an option of the hook |")
        if model is GroupConfig:
            lines.append("| any other | | | an option of the optimizer, such as `lr` |")
        lines.append("")
    return "\n".join(lines)


def _own(base: type) -> set[str]:
    return set(base.model_fields) if issubclass(base, BaseModel) else set()


def _row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else _default(field)
    return f"| `{name}` | {_values(field.annotation)} | {default} | {field.description} |"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{json.dumps(value)}`"


def _values(annotation: Any) -> str:
    """Return the valid values of a key in a few words."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(inside[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin in (Union, UnionType):
        return ", ".join(dict.fromkeys(_values(one) for one in inside))
    if annotation is NoneType:
        return "null"
    if origin is list:
        return f"a list ({_values(inside[0])})"
    if origin is dict:
        return f"a mapping ({_values(inside[1])})"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return NAMES[annotation.__name__]
    return PLAIN[annotation]


if __name__ == "__main__":
    print(tables())
