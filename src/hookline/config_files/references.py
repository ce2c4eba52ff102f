"""References in strings: `${model.init_args.width}` to another key, `${NAME}` to the environment.

| written | replaced by |
|---|---|
| `${a.b}`, `${a[0].b}` | the value of another key of the configuration |
| `${name}` | the top-level key of this name; if there is none, the environment variable |
| `${env:NAME}` | the environment variable |
| `${…:default}` | the default, if there is no such key or variable |
| `$${` | a literal `${` |

A string that is one reference takes the referenced value with its type. An environment variable or
default then becomes the number, boolean or null it is written as. Within a longer string, the
value becomes text. References are resolved when all files are merged and overrides are applied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from hookline.config_files.parsing import MAX_DEPTH, MAX_VALUES, parse_value
from hookline.config_files.tree import (
    ConfigTree,
    FileError,
    Key,
    ProblemList,
    format_key,
    format_value,
)
from hookline.errors import nearest

REFERENCE_PATTERN = r"^\$\{[^{}]+\}$"
"""A string that is one reference, for the JSON schema."""

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}:]*)(?::([^{}]*))?\}|\$\{")
_NAME = re.compile(r"[^\s{}:.\[\]$]+(?:\.[^\s{}:.\[\]$]+|\[\d+\])*")
_INDEX = re.compile(r"\[(\d+)\]")
_MAX_SIZE = MAX_VALUES  # of what references lead to: values, and texts of 50 characters
_MISSING = object()


def resolve_references(tree: ConfigTree, environment: Mapping[str, str]) -> None:
    """Replace all references by their values; raise a `FileError` that names every wrong one."""
    resolver = _Resolver(tree, environment)
    try:
        values = resolver.resolve(tree.values, ())
    except RecursionError:
        raise FileError([tree.problem((), "References are nested too deeply.")]) from None
    resolver.problems.raise_any()
    tree.values = values


def split_key(name: str) -> list[str]:
    """Return the parts of a key such as `hooks.0.every` or `hooks[0].every`."""
    return _INDEX.sub(r".\1", name).split(".")


class _Resolver:
    def __init__(self, tree: ConfigTree, environment: Mapping[str, str]) -> None:
        self._tree, self._environment = tree, environment
        self._active: list[Key] = []  # the strings that are being resolved, outermost first
        self._size = 0
        self.problems = ProblemList()

    def resolve(self, value: Any, key: Key) -> Any:
        """Return a copy of a value in which all references are replaced."""
        try:
            if self._active:  # values outside references were counted by the parser
                self._count(1)
            if isinstance(value, dict):
                return {name: self.resolve(inner, (*key, name)) for name, inner in value.items()}
            if isinstance(value, list):
                return [self.resolve(inner, (*key, i)) for i, inner in enumerate(value)]
            return self._resolve_string(value, key) if _has_reference(value) else value
        except FileError as error:
            if self._active:
                raise
            self.problems.extend(error.problems)  # and look for others
            return value

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > _MAX_SIZE or len(self._active) > MAX_DEPTH:
            self._fail(
                "References lead to more than 20,000 values or a million characters, or in more "
                "than 40 steps from one to the next."
            )

    def _resolve_string(self, text: str, key: Key) -> Any:
        if key in self._active:
            self._fail_with_cycle(key)
        self._active.append(key)
        try:
            single = _REFERENCE.fullmatch(text)
            if single is not None and single[1] is not None:
                value, is_text = self._find_value(single)
                return _typed(value) if is_text else value
            result = _REFERENCE.sub(self._text_of, text)
            self._count(len(result) // 50)
            return result
        finally:
            self._active.pop()

    def _text_of(self, found: re.Match[str]) -> str:
        """Return the text for a reference within a longer string."""
        if found[0] == "$${":
            return "${"
        value, _ = self._find_value(found)
        if isinstance(value, dict | list):
            self._fail(
                f"{found[0]} is no single value, which cannot be a part of a text. Make the "
                "reference the whole value."
            )
        if isinstance(value, bool) or value is None:
            return {True: "true", False: "false", None: "null"}[value]
        return str(value)

    def _find_value(self, found: re.Match[str]) -> tuple[Any, bool]:
        """Return the value of a reference, and whether it is text without a type of its own."""
        name: str | None = found[1]
        default: str | None = found[2]
        from_environment = name == "env" and default is not None
        if from_environment and default is not None:
            name, colon, rest = default.partition(":")
            default = rest if colon else None
        if name is None or not _NAME.fullmatch(name):
            self._fail(
                f"{self._show(found[0])} is not a reference. Expected ${{key}}, ${{NAME}}, "
                "${env:NAME} or ${NAME:default}; write a literal '${' as '$${'."
            )
        parts = split_key(name)
        is_key = not from_environment and (len(parts) > 1 or parts[0] in self._tree.values)
        if is_key:
            value = self._look_up(parts, required=default is None)
            if value is not _MISSING:
                return value, False
        elif name in self._environment:
            return self._environment[name], True
        elif default is None:
            what = "environment variable" if from_environment else "key or environment variable"
            names = [*self._environment, *([] if from_environment else self._tree.values)]
            self._fail(
                f"There is no {what} {self._show(name)}.{nearest(name, names)} Set it, or give a "
                f"default: {self._show(f'{found[0][:-1]}:…}}')}."
            )
        return default, True

    def _look_up(self, parts: list[str], *, required: bool) -> Any:
        """Return the resolved value of a key."""
        value: Any = self._tree.values
        key: Key = ()
        is_resolved = False
        for part in parts:
            if not is_resolved and _has_reference(value):
                value, is_resolved = self._resolve_string(value, key), True
            index: Any = part
            known: Any = value if isinstance(value, dict) else ()
            if isinstance(value, list) and part.isdecimal() and len(part) < 9:
                index, known = int(part), range(len(value))
            if index not in known:
                if not required:
                    return _MISSING
                names = [format_key((*key, name)) for name in known if isinstance(name, str)]
                missing = format_key((*key, part))
                self._fail(f"There is no key {self._show(missing)}.{nearest(missing, names)}")
            value, key = value[index], (*key, index)
        return value if is_resolved else self.resolve(value, key)

    def _show(self, text: str) -> str:
        """Return a part of the string that is being resolved; it is masked under a secret name."""
        return format_value(text, self._active[-1] if self._active else ())

    def _fail(self, text: str) -> NoReturn:
        key = self._active[-1] if self._active else ()
        raise FileError([self._tree.problem(key, text)])

    def _fail_with_cycle(self, key: Key) -> NoReturn:
        cycle = self._active[self._active.index(key) :]
        first = cycle.index(min(cycle, key=format_key))  # the same from wherever it is entered
        cycle = cycle[first:] + cycle[:first]
        chain = " → ".join(format_key(one) for one in (*cycle, cycle[0]))
        text = f"The reference leads back to itself: {chain}."
        raise FileError([self._tree.problem(cycle[0], text)])


def _has_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _typed(text: str) -> Any:
    """Return the number, boolean or null that a text is written as; any other text as it is."""
    try:
        value = parse_value(text) if text else text
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) or value is None else text
