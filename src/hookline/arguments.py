"""Checks of arguments: each raises an `ArgumentError` that says what was given and what is valid.

`what` is the argument as messages name it, such as `attach(…, tags=…)`. The checks are called where
an object is made, not in every step. A value may be anything, also an object whose own methods
raise: `show_value` and `describe_value` never fail.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, cast

from hookline.errors import ArgumentError, listed, nearest
from hookline.masking import masked_repr
from hookline.printable import printable

_FLOAT_LIMIT = sys.float_info.max


def show_value(value: object, *names: object, limit: int = 200) -> str:
    """Return a value's `repr` on one line, cut after `limit` characters. It never fails.

    Secrets are masked: those that are known, and all of the value if one of its names looks secret.
    """
    try:
        return printable(masked_repr(value, *names), limit)
    except Exception as error:  # RecursionError included
        return f"<{_type_name(value)}, whose repr raises {type(error).__name__}>"


def describe_value(value: object) -> str:
    """Return a value and its type, for an error message. It never fails."""
    name = _name_value(value)
    return f"{name}, a {_type_name(value)}" if name == show_value(value) else name


def _name_value(value: object) -> str:
    """Return a value as messages show it: tensors and classes in words."""
    torch = sys.modules.get("torch")  # not imported: there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(cast('Any', value).shape)}"
    if isinstance(value, type):
        return f"the class {printable(value.__name__)}"
    return show_value(value)


def _type_name(value: object) -> str:
    return printable(type(value).__name__)


def as_reason(reason: Any) -> str:
    """Return why something is asked for, as a string, whatever was given."""
    if reason is None:
        return ""
    return str.__str__(reason) if isinstance(reason, str) else show_value(reason)


def check_instance(what: str, value: Any, types: Any, expected: str) -> None:
    """Raise unless a value is an instance of one of these types."""
    if not isinstance(value, types):
        raise _wrong(what, value, expected)


def check_flag(what: str, value: Any) -> None:
    """Raise unless a value is True or False."""
    if not isinstance(value, bool):
        raise _wrong(what, value, "True or False")


def check_choice(what: str, value: Any, choices: Iterable[str]) -> None:
    """Raise unless a value is one of these strings."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise ArgumentError(
            f"{what} is {show_value(value)}; expected one of {listed(choices)}.{hint}"
        )


def check_function(what: str, value: Any, *arguments: str) -> None:
    """Raise unless a value is a function that takes these arguments by position."""
    if not callable(value):
        raise _wrong(what, value, f"a function of ({', '.join(arguments)})")
    torch = sys.modules.get("torch")
    is_module = torch is not None and isinstance(value, torch.nn.Module)
    try:
        signature = inspect.signature(cast("Any", value).forward if is_module else value)
        name = getattr(value, "__name__", type(value).__name__)
    except Exception:  # some functions in C have no signature; an object's own methods may raise
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        own = printable(f"{name}({', '.join(signature.parameters)})")
        raise ArgumentError(
            f"{what} is called with ({', '.join(arguments)}), and {own} does not take these "
            f"arguments: {error}. Give a function that does."
        ) from None


def read_attribute(value: Any, name: str) -> Any:
    """Return an attribute of any object; None if it has none, or if reading it raises."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def is_number(value: object) -> bool:
    """Return whether a value is a number of Python or numpy."""
    return isinstance(value, int | float) or (isinstance(value, Real) and hasattr(value, "dtype"))


def check_whole_number(what: str, value: Any, minimum: int = 0, maximum: int | None = None) -> None:
    """Raise unless a value is an integer, of Python or numpy, from `minimum` to `maximum`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise _wrong(what, value, f"a whole number of at least {minimum}")
    if maximum is not None and int(value) > maximum:
        raise _wrong(what, value, f"a whole number of at most {maximum}")


def check_number(what: str, value: Any, minimum: float, *, is_included: bool = True) -> None:
    """Raise unless a value is a number from `minimum`, or above it, that a float can be."""
    if isinstance(value, bool) or not is_number(value) or not -_FLOAT_LIMIT < value < _FLOAT_LIMIT:
        raise _wrong(what, value, "a finite number")
    if value < minimum or (value == minimum and not is_included):
        raise _wrong(what, value, f"a number {'of at least' if is_included else 'above'} {minimum}")


def check_name(what: str, value: Any) -> None:
    """Raise unless a value is a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise _wrong(what, value, "a string that is not empty")


def check_path(what: str, value: Any, expected: str = "a path") -> str:
    """Return a path as a string, without `~`; raise unless it is a path that a file may have."""
    try:
        text = os.fspath(value)
        if not isinstance(text, str):
            raise _wrong(what, value, f"{expected}: a string or a Path")
        text = str.__str__(text)  # the value of a subclass, whose own methods may return another
        os.fsencode(text)
    except Exception:  # not a path, or `__fspath__` raises, or it cannot be encoded
        raise _wrong(what, value, f"{expected}: a string or a Path") from None
    if not text or "\0" in text:
        raise _wrong(what, value, f"{expected}, which is neither empty nor has a NUL")
    return os.path.expanduser(text)  # noqa: PTH111 - that of Path raises without a home folder


def user_path(given: str | os.PathLike[str]) -> Path:
    """Return a path as a user gave it, with the home folder for `~`."""
    return Path(os.path.expanduser(given))  # noqa: PTH111 - that of Path raises without one


def check_mapping(what: str, value: Any) -> dict[str, Any]:
    """Return a mapping as a dict; raise unless it is one whose keys are strings."""
    expected = "a mapping from names to values"
    if not isinstance(value, Mapping):
        raise _wrong(what, value, expected)
    copied = dict(_read(what, value, expected, lambda: value.items()))
    for key in copied:
        if not isinstance(key, str):
            raise ArgumentError(
                f"{what} has the key {describe_value(key)}; expected names as keys."
            )
    return copied


def listed_strings(what: str, value: Any) -> list[str]:
    """Return one or several strings as a list; raise if they are anything else."""
    if isinstance(value, str):
        return [value]
    expected = "a string or a list of strings"
    several = read_items(what, value, expected)
    for item in several:
        if not isinstance(item, str):
            raise _wrong(what, item, expected)
    return several


def read_items(what: str, value: Any, expected: str) -> list[Any]:
    """Return the items of an iterable; raise if it is none, or cannot be iterated over."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _wrong(what, value, expected)
    return _read(what, value, expected, lambda: value)


def _read(what: str, value: Any, expected: str, items: Callable[[], Iterable[Any]]) -> list[Any]:
    try:
        return list(items())
    except Exception as error:
        raise ArgumentError(
            f"{what} is a {_type_name(value)} that cannot be read "
            f"({type(error).__name__}: {show_value(error)}); expected {expected}."
        ) from error


def _wrong(what: str, value: Any, expected: str) -> ArgumentError:
    return ArgumentError(f"{what} is {_name_value(value)}; expected {expected}.")
