"""The form in which a hook gets a value: plain by default, or as its parameter is annotated.

`loss`, `grad_norm` and `lr` are floats, or `LazyFloat`s where annotated so. Paths are strings, or
`Path`s where annotated so. In `on_eval_end`, the names of metrics begin with `eval/`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hookline.context import EvalMetrics, LazyFloat, Metrics
from hookline.events import Argument


class WantedValue(NamedTuple):
    """An argument in the form that a parameter wants; without a form, as the loop provides it."""

    argument: str
    form: str = ""

    @property
    def variable(self) -> str:
        """The variable that has the value in generated code."""
        return f"{self.form or 'a'}_{self.argument}"

    @property
    def key(self) -> str:
        """The key of the value among those that were loaded for an event."""
        return self.variable if self.form else self.argument


def _to_float(value: Any) -> Any:
    return value if value is None or type(value) is float else float(value)


def _to_lazy(value: Any) -> Any:
    return value if value is None or type(value) is LazyFloat else LazyFloat(value)


def _to_str(value: Any) -> Any:
    return None if value is None else str(value)


def _to_path(value: Any) -> Any:
    return None if value is None else Path(value)


def _to_eval(metrics: Any) -> Any:
    return EvalMetrics(metrics) if type(metrics) is Metrics else metrics


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "float": _to_float,
    "lazy": _to_lazy,
    "str": _to_str,
    "path": _to_path,
    "eval": _to_eval,
}
"""The functions that convert a value, by form."""

_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}


def choose_form(argument: Argument, parameter: inspect.Parameter, method: Any) -> str:
    """Return the form in which a parameter of a method wants an argument."""
    if not argument.form:
        return ""
    if parameter.kind is parameter.VAR_KEYWORD:
        return "lazy" if argument.form == "float" else argument.form
    names = _type_names(parameter.annotation, _namespace(method))
    if argument.form == "float" and "LazyFloat" in names:
        return "lazy"
    if argument.form == "str" and names & _PATHS and "str" not in names:
        return "path"
    return argument.form


def _namespace(method: Any) -> dict[str, Any]:
    """Return the globals in which a method's annotations are written."""
    function = inspect.unwrap(method)
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    if not hasattr(function, "__globals__"):
        function = inspect.unwrap(type(function).__call__)
    return getattr(function, "__globals__", {})


def _type_names(annotation: Any, namespace: dict[str, Any]) -> set[str]:
    """Return the names of the types in an annotation, also in `Optional` and in strings."""
    if isinstance(annotation, str):
        with suppress(Exception):  # such as a name that is imported under TYPE_CHECKING
            annotation = eval(annotation, namespace)
    return set(re.findall(r"\w+", annotation if isinstance(annotation, str) else repr(annotation)))
