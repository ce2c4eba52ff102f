"""Options of hooks: read from a class's signature and docstring, and checked before it is made.

An option is a parameter of `__init__`. Its annotation says what is valid, its default is the
default, and the class's docstring explains it under `Args:`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from hookline.errors import ConfigError, nearest

__all__ = ["Option", "check_options", "options_of"]

_OF_ADD_HOOK = ("every", "sample_rate", "from_epoch", "before", "after", "strict")
_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class Option:
    """One option of a hook."""

    name: str
    type: str
    default: Any
    text: str
    hint: Any

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is _EMPTY

    @cached_property
    def _check(self) -> TypeAdapter[Any] | None:
        """What checks a value; None for a type that cannot be checked."""
        try:
            return TypeAdapter(self.hint, config=ConfigDict(arbitrary_types_allowed=True))
        except PydanticSchemaGenerationError:
            return None

    def problem(self, value: Any) -> str | None:
        """Say what is wrong with a value."""
        if self._check is None:
            return None
        try:
            valid = self._check.validate_python(value)
        except ValidationError as error:
            return "; ".join(dict.fromkeys(one["msg"] for one in error.errors()))
        if isinstance(value, str) and isinstance(valid, int | float):
            return "A number is written without quotes"  # what is given is used as it is
        return None


@cache
def options_of(kind: Any) -> Mapping[str, Option]:
    """Return a hook class's options by name."""
    writer = next(one for one in kind.__mro__ if "__init__" in one.__dict__)
    texts = _texts(inspect.getdoc(writer) or "") | _texts(inspect.getdoc(kind) or "")
    hints = _hints(kind)
    return {
        one.name: Option(
            name=one.name,
            type=_type_text(one.annotation),
            default=one.default,
            text=texts.get(one.name, ""),
            hint=hints.get(one.name, Any),
        )
        for one in _parameters(kind)
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }


def check_options(
    kind: Any, args: tuple[Any, ...], given: Mapping[str, Any], *, values: bool
) -> dict[str, Any]:
    """Return the options that a hook would get, defaults included; raise if they do not fit.

    Args:
        kind: the hook's class.
        args: what is given in order.
        given: what is given by name.
        values: whether to check values against their annotations, too.
    """
    known = options_of(kind)
    options = dict(zip(known, args, strict=False)) | dict(given)
    problems: list[str] = []
    for name, value in options.items():
        if name in known:
            problem = known[name].problem(value) if values else None
            if problem is not None:
                problems.append(f"'{name}' is {value!r}. {problem}.")
        elif any(one.kind is one.VAR_KEYWORD for one in _parameters(kind)):
            continue
        elif name in _OF_ADD_HOOK:
            problems.append(_belongs_to_registration(kind, name))
        else:
            there = f"The options are: {', '.join(known)}." if known else "It has no options."
            problems.append(f"'{name}' is no option.{nearest(name, known)} {there}")
    if problems:
        raise ConfigError(f"{kind.__name__}: " + "\n  ".join(problems))
    return {name: one.default for name, one in known.items() if not one.required} | options


def _belongs_to_registration(kind: Any, name: str) -> str:
    problem = (
        f"'{name}' belongs to the registration. Give it to add_hook(hook, {name}=…), or beside the "
        "hook's name in a config file."
    )
    if name == "every" and kind.hookline_kind == "probe":
        problem += " Outside of training: hookline.probe(model, …, every=…)."
    return problem


def _parameters(kind: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(kind.__init__).parameters.values())[1:]


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return get_type_hints(kind.__init__, include_extras=True)
    except (NameError, TypeError):  # annotations that only a type checker understands
        return {}


def _type_text(annotation: Any) -> str:
    if annotation is _EMPTY:
        return "Any"
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "Any")


def _texts(doc: str) -> dict[str, str]:
    """What the section `Args:` of a docstring says of each."""
    _, _, section = doc.partition("Args:\n")
    section = section.partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in found}
