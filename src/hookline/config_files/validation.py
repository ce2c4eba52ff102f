"""A merged configuration, checked by the models; every error with its place and the nearest key."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hookline.config_files.file_model import TAGS, HooksByKind, TrainingConfig
from hookline.config_files.merging import Merged
from hookline.config_files.problems import FileError, Key, Problem, dotted, shown
from hookline.errors import nearest

__all__ = ["validated"]


def validated(merged: Merged) -> TrainingConfig:
    """Return the configuration, if it fits.

    Raises:
        FileError: names every key that does not.
    """
    try:
        return TrainingConfig.model_validate(merged.values)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        problems = [_problem(merged, dict(one)) for one in found]
    raise FileError(list(dict.fromkeys(problems)))


def _problem(merged: Merged, error: dict[str, Any]) -> Problem:
    path: Key = error["loc"]
    key = tuple(part for part in path if part not in TAGS)
    kind: str = error["type"]
    fields = _fields_at(path[:-1])
    if kind == "extra_forbidden":
        name = str(path[-1])
        there = f" The keys here are: {', '.join(fields)}." if fields else ""
        return merged.problem(key, f"'{name}' is no key.{nearest(name, fields)}{there}")
    if kind == "missing":
        meaning = fields.get(str(path[-1]), "")
        hint = f" Expected {meaning}." if meaning else ""
        # Its place is that of what it is missing in.
        file, line = merged.place(key[:-1])
        return Problem(file, line, dotted(key), f"It is missing.{hint}")
    return merged.problem(key, f"It is {shown(error['input'])}. {_expected(kind, error['msg'])}.")


def _expected(kind: str, message: str) -> str:
    if kind == "model_type":
        return "Expected a mapping" + (" or a list" if "HooksByKind" in message else "")
    if kind == "string_pattern_mismatch":
        return "Expected a class path, `package.module.Name`"
    return message.removeprefix("Value error, ").rstrip(".")


def _fields_at(path: Key) -> dict[str, str]:
    """The keys of what stands at this path, and what each means."""
    models: list[type[BaseModel]] = [TrainingConfig]
    for part in path:
        if part == "(one)" and HooksByKind in models:
            models = [HooksByKind]
        if part in TAGS or isinstance(part, int):
            continue
        inner = [one.model_fields[part] for one in models if part in one.model_fields]
        if inner:
            models = [model for one in inner for model in _models_in(one.annotation)]
    return {
        field.alias or name: field.description or ""
        for model in models
        for name, field in model.model_fields.items()
    }


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for one in get_args(annotation) for model in _models_in(one)]
