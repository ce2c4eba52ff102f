"""BuiltIn: the base of Hookline's own hooks, whose options are checked when one is made.

An option is a parameter of `__init__`. Its annotation says what is valid, its default is the
default, and the class's docstring explains it under `Args:`. The checks, the manifest and the
reference pages are all made from these.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hookline.errors import ConfigError, nearest
from hookline.hook import Hook

__all__ = ["BuiltIn", "Option", "options_of"]

REQUIRED = inspect.Parameter.empty


class BuiltIn(Hook):
    """A hook of Hookline's own.

    What it was made with stays in `hookline_options`, for the manifest.
    """

    cost: ClassVar[str] = ""
    """What it costs, in one sentence, for the reference page."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the options; `__init__` gets them as they were given."""
        hook = super().__new__(cls)
        hook.hookline_options = _checked(cls, args, options)
        return hook


@dataclass(frozen=True)
class Option:
    """One option of a built-in hook."""

    name: str
    type: str
    default: Any
    text: str
    check: Any

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is REQUIRED


@cache
def options_of(kind: Any) -> Mapping[str, Option]:
    """Return a hook's options by name, from its signature and its docstring."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    hints = get_type_hints(kind.__init__, include_extras=True)
    texts = _texts(inspect.getdoc(kind) or "")
    return {
        one.name: Option(
            name=one.name,
            type=_type_text(one.annotation),
            default=one.default,
            text=texts.get(one.name, ""),
            check=TypeAdapter(
                hints.get(one.name, Any), config=ConfigDict(arbitrary_types_allowed=True)
            ),
        )
        for one in parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }


def _checked(kind: Any, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    known = options_of(kind)
    if len(args) > len(known):
        raise ConfigError(f"{kind.__name__} takes {len(known)} options, and got {len(args)}.")
    options = dict(zip(known, args, strict=False)) | given
    problems: list[str] = []
    for name, value in options.items():
        if name not in known:
            problems.append(
                f"'{name}' is no option.{nearest(name, list(known))} "
                f"The options are: {', '.join(known)}."
            )
            continue
        try:
            known[name].check.validate_python(value, strict=False)
        except ValidationError as error:
            details = "; ".join(dict.fromkeys(one["msg"] for one in error.errors()))
            problems.append(f"'{name}' is {value!r}. {details}.")
    if problems:
        raise ConfigError(f"{kind.__name__}: " + "\n  ".join(problems))
    return options


def _type_text(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "Any")
    return "Any" if annotation is REQUIRED else text


def _texts(doc: str) -> dict[str, str]:
    """What the section `Args:` of a docstring says of each."""
    _, _, section = doc.partition("Args:\n")
    section = section.partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in found}
