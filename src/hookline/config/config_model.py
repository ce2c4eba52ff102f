"""The base class of configurations: their errors name each field, and the fix."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from hookline.arguments import show_value
from hookline.errors import ConfigError, nearest
from hookline.printable import message_lines

_MAX_PROBLEMS = 10  # that a message shows


class Config(BaseModel):
    """Base class: unknown and invalid fields raise one `ConfigError` that names all of them."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    def __init__(self, /, **data: Any) -> None:
        with _named_errors(type(self)):
            super().__init__(**data)

    def __setattr__(self, name: str, value: Any) -> None:
        with _named_errors(type(self)):
            super().__setattr__(name, value)

    # Marks this as pydantic's own __init__: pydantic then does not call it for models within
    # models, whose errors keep their path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


@contextmanager
def _named_errors(model: type[BaseModel]) -> Generator[None]:
    """Raise a `ConfigError` that names each field, whatever a value makes pydantic raise."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(_format_errors(model, error)) from None
    except ConfigError:
        raise
    except Exception as error:  # of the value's own methods, or too deeply nested
        raise ConfigError(
            f"{model.__name__}: A value cannot be read ({type(error).__name__}: "
            f"{show_value(error)}). Give plain numbers, strings, lists and dicts."
        ) from error


UNKNOWN_FIELD_ERRORS = ("extra_forbidden", "no_such_attribute", "unexpected_keyword_argument")
"""The types of pydantic's errors about a field that does not exist."""


def _format_errors(model: type[BaseModel], error: ValidationError) -> str:
    lines: list[str] = []
    listed_fields: list[dict[str, str]] = []  # each of them once
    details = error.errors(include_url=False)
    for detail in details[:_MAX_PROBLEMS]:
        path = ".".join(str(part) for part in detail["loc"])
        if detail["type"] in UNKNOWN_FIELD_ERRORS:
            known = describe_fields(model, detail["loc"][:-1])
            hint = nearest(str(detail["loc"][-1]), known)
            valid = f" The fields are: {', '.join(known)}." if known not in listed_fields else ""
            lines.append(f"Unknown field '{path}'.{hint}{valid}")
            listed_fields.append(known)
        elif detail["type"] == "value_error":  # of a validator here, whose message is complete
            message = str(detail.get("ctx", {})["error"])
            lines.append(f"{path}: {message}" if path else message)
        else:
            shown = show_value(detail["input"], *detail["loc"])
            lines.append(f"'{path}' is {shown}. {detail['msg']}.")
    if len(details) > _MAX_PROBLEMS:
        lines.append(f"And {len(details) - _MAX_PROBLEMS} more problems.")
    return message_lines(f"{model.__name__}: {lines[0]}", *lines[1:])


def describe_fields(model: type[Any], path: tuple[str | int, ...]) -> dict[str, str]:
    """Return the fields, with their descriptions, of all models at a path of a model."""
    models = [model]
    for part in path:
        found = [_fields(one)[part] for one in models if part in _fields(one)]
        if found:
            models = [inner for annotation, _ in found for inner in _find_models(annotation)]
    return {name: text for one in models for name, (_, text) in _fields(one).items()}


def _fields(model: type[Any]) -> Mapping[Any, tuple[Any, str]]:
    """Return the annotation and the description of each field."""
    if is_dataclass(model):
        return {one.name: (one.type, "") for one in fields(model)}
    return {
        field.alias or name: (field.annotation, field.description or "")
        for name, field in model.model_fields.items()
    }


def _find_models(annotation: Any) -> list[type[Any]]:
    """Return the models in an annotation such as `list[Model] | None`."""
    if isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or is_dataclass(annotation)
    ):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _find_models(inner)]
