"""From files to one configuration: includes, environment variables, `key=value`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.config_files.file_parsing import read_file, read_value
from hookline.config_files.problems import COMMAND_LINE, FileError, Key, Problem, dotted, shown
from hookline.errors import nearest

__all__ = ["Merged", "merge_files", "parse_override"]

_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_]\w*)(?::([^{}]*))?\}|\$\{")
_NULLS = ("null", "Null", "NULL", "~")
_INDEX = re.compile(r"\[(\d+)\]")


@dataclass
class Merged:
    """A configuration, and where each of its keys comes from.

    Attributes:
        file: the main file, as it was named.
        values: the configuration.
        where: for each key the file, and the line where it is known.
    """

    file: str
    values: dict[str, Any]
    where: dict[Key, tuple[str, int | None]]

    def place(self, key: Key) -> tuple[str, int | None]:
        """Return where a key stands; of one that is not there, where it would have to."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.where:
                return self.where[key[:length]]
        return self.file, None

    def problem(self, key: Key, text: str) -> Problem:
        """Return what is wrong with a key, with its place."""
        file, line = self.place(key)
        return Problem(file, line, dotted(key), text)


def merge_files(
    path: Path, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Merged:
    """Return the configuration of a file, with all that it includes.

    Args:
        path: the file.
        overrides: `key=value`, applied in this order after everything else.
        environment: the environment's variables.

    Raises:
        FileError: names all that cannot be read or resolved.
    """
    merged = _merged(path, str(path), os.environ if environment is None else environment, ())
    problems = [problem for text in overrides if (problem := _override(merged, text)) is not None]
    if problems:
        raise FileError(problems)
    return merged


def _merged(path: Path, name: str, environment: Mapping[str, str], within: Key) -> Merged:
    real = str(path.resolve())
    if real in within:
        chain = " includes ".join(Path(str(one)).name for one in (*within, real))
        raise FileError([Problem(name, None, "include", f"Files include each other: {chain}.")])
    read = read_file(path, name)
    own = Merged(name, read.values, {key: (name, line) for key, line in read.lines.items()})
    problems: list[Problem] = []
    own.values = _substituted(own, own.values, (), environment, problems)
    result = Merged(name, {}, {})
    for key, include in _includes(own, problems):
        try:
            there = _merged(
                path.parent / include,
                str(Path(name).parent / include),
                environment,
                (*within, real),
            )
            _merge_into(result, there)
        except FileError as error:
            file, line = own.place(key)
            problems += [
                Problem(file, line, dotted(key), f"'{one.file}': {one.text}")
                if one.line is None and one.key == ""
                else one
                for one in error.problems
            ]
        except (OSError, ValueError) as error:  # a name that no file can have
            problems.append(own.problem(key, f"{shown(include)} cannot be read ({error})."))
    if problems:
        raise FileError(problems)
    _merge_into(result, own)
    return result


def _includes(own: Merged, problems: list[Problem]) -> list[tuple[Key, str]]:
    given = own.values.pop("include", None)
    several: list[Any] = [] if given is None else given if isinstance(given, list) else [given]
    found: list[tuple[Key, str]] = []
    for i, one in enumerate(several):
        key: Key = ("include", i) if isinstance(given, list) else ("include",)
        if isinstance(one, str) and one:
            found.append((key, one))
        else:
            problems.append(own.problem(key, f"It is {shown(one)}; expected the name of a file."))
    return found


# -- one over another -----------------------------------------------------------------------------


def _merge_into(base: Merged, over: Merged) -> None:
    base.values = _over(base, base.values, over.values, ())
    base.where.update(over.where)


def _over(base: Merged, old: Any, new: Any, key: Key) -> Any:
    """Mappings are merged, everything else is replaced; so are the arguments of another class."""
    both = isinstance(old, dict) and isinstance(new, dict)
    if not both or (
        "class_path" in new and "class_path" in old and new["class_path"] != old["class_path"]
    ):
        for known in [one for one in base.where if one[: len(key)] == key]:
            del base.where[known]
        return new
    result = dict(old)
    for name, value in new.items():
        result[name] = _over(base, old[name], value, (*key, name)) if name in old else value
    return result


# -- the environment ------------------------------------------------------------------------------


def _substituted(
    own: Merged, value: Any, key: Key, environment: Mapping[str, str], problems: list[Problem]
) -> Any:
    if isinstance(value, dict):
        return {
            name: _substituted(own, one, (*key, name), environment, problems)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [
            _substituted(own, one, (*key, i), environment, problems) for i, one in enumerate(value)
        ]
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        return _with_variables(value, environment)
    except ValueError as error:
        problems.append(own.problem(key, str(error)))
        return value


def _with_variables(text: str, environment: Mapping[str, str]) -> Any:
    """Put variables in; a text that is nothing but one variable becomes a number or a truth."""

    def put(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if found[0] == "$${":
            return "${"
        if name is None:
            raise ValueError(
                f"{shown(text)} has a '${{' that is no variable. Expected ${{NAME}} or "
                "${NAME:default}; a '${' of its own is written '$${'."
            )
        if name in environment:
            return environment[name]
        if default is None:
            hint = nearest(name, environment)
            raise ValueError(
                f"The environment has no variable '{name}'.{hint} Set it, or give a default: "
                f"${{{name}:…}}."
            )
        return str(default)

    result = _VARIABLE.sub(put, text)
    alone = _VARIABLE.fullmatch(text)
    if alone is None or alone[1] is None or not result:
        return result
    try:
        value = read_value(result)
    except ValueError:
        return result
    return value if isinstance(value, bool | int | float) or value is None else result


# -- the command line -----------------------------------------------------------------------------


def parse_override(text: str) -> tuple[Key, Any]:
    """Return the key and the value of `hooks.0.every=5`; the value is written as YAML.

    Raises:
        ValueError: it is none.
    """
    name, equals, given = text.partition("=")
    parts = _INDEX.sub(r".\1", name.strip()).split(".")
    if not equals or not all(parts):
        raise ValueError(
            f"{shown(text)} is no setting. Expected key=value, such as trainer.max_epochs=3 or "
            "hooks.0.every=5."
        )
    try:
        value = read_value(given)
    except ValueError as error:
        raise ValueError(f"The value in {shown(text)} cannot be read. {error}") from None
    if value is None and given.strip() not in _NULLS:  # such as a variable that is not set
        raise ValueError(f"{shown(text)} has no value. To have none, write {name.strip()}=null.")
    return tuple(parts), value


def _override(merged: Merged, text: str) -> Problem | None:
    try:
        parts, value = parse_override(text)
        key = _put(merged, parts, value)
    except ValueError as error:
        return Problem(COMMAND_LINE, None, "", str(error))
    for known in [one for one in merged.where if one[: len(key)] == key]:
        del merged.where[known]
    merged.where[key] = (COMMAND_LINE, None)
    return None


def _put(merged: Merged, parts: Key, value: Any) -> Key:
    """Set a value, and make the mappings on the way to it; return its key."""
    holder: Any = {"": merged.values}
    last: str | int = ""
    key: Key = ()
    for part in map(str, parts):
        here: Any = holder[last]
        if here is None:
            here = holder[last] = {}
        elif isinstance(here, str) and key:  # short for a mapping
            here = holder[last] = {"name" if key[0] == "hooks" else "class_path": here}
        if isinstance(here, list):
            holder, last = here, _index(here, part, key)
        elif isinstance(here, dict):
            if part not in here:
                here[part] = None
                merged.where[*key, part] = (COMMAND_LINE, None)
            holder, last = here, part
        else:
            raise ValueError(  # noqa: TRY004 - a wrong setting, whatever is wrong with it
                f"'{dotted(parts)}' cannot be set: '{dotted(key)}' is {shown(here)}, which has no "
                "keys."
            )
        key = (*key, last)
    holder[last] = value
    return key


def _index(items: list[Any], part: str, key: Key) -> int:
    if not (part.isascii() and part.isdigit() and len(part) < 9 and int(part) < len(items)):
        raise ValueError(
            f"'{dotted(key)}' is a list of {len(items)}, which has no '{part}'. Expected a number "
            "below that, from 0."
        )
    return int(part)
