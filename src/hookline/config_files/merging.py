"""From files to one configuration: includes, then overrides, then references."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.arguments import user_path
from hookline.config_files.parsing import MAX_DEPTH, MIN_SIZE, parse_file, parse_value
from hookline.config_files.references import resolve_references, split_key
from hookline.config_files.tree import (
    COMMAND_LINE,
    ConfigTree,
    FileError,
    Key,
    Problem,
    ProblemList,
    format_key,
    format_value,
)
from hookline.files import file_limits
from hookline.masking import mask_arguments, remember_secrets

MAX_INCLUDE_DEPTH = 10
_NULLS = ("null", "Null", "NULL", "~")


@dataclass
class _Includes:
    """The limits and the environment of all files of a configuration."""

    folders: tuple[Path, ...]  # that files may be included from
    environment: Mapping[str, str]
    bytes_left: int = field(default_factory=lambda: file_limits.config_bytes)  # for further files

    def find_problem(self, path: Path, depth: int) -> str | None:
        """Return why a file is not included, or None if it may be."""
        if depth > MAX_INCLUDE_DEPTH:
            return f"Files include each other in more than {MAX_INCLUDE_DEPTH} levels."
        folder = path.parent.resolve()
        if not any(one in (folder, *folder.parents) for one in self.folders):
            return (
                f"It is outside of the project ({self.folders[0]}). Move it there, or run the "
                "command in a folder that contains both."
            )
        return None


def merge_files(
    path: Path,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    project: Path | None = None,
) -> ConfigTree:
    """Return the configuration of a file and of all files it includes."""
    environment = os.environ if environment is None else environment
    try:
        folder, _ = path.parent.resolve(), path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise FileError([Problem(str(path), None, "", f"It cannot be read ({error}).")]) from None
    includes = _Includes((folder if project is None else project, folder), environment)
    tree = _merge_includes(folder / path.name, str(path), includes, ())
    problems = ProblemList()
    for text in overrides:
        try:
            _apply_override(tree, text)
        except ValueError as error:
            problems.append(Problem(COMMAND_LINE, None, "", str(error)))
    problems.raise_any()
    resolve_references(tree, environment)
    remember_secrets(tree.values)
    return tree


# -- includes -------------------------------------------------------------------------------------


def _merge_includes(
    path: Path, name: str, includes: _Includes, including: tuple[Path, ...]
) -> ConfigTree:
    """Return a file, called `name` in messages, merged over the files it includes.

    `including` are the files that lead to it. Without any, it is the user's: a link is followed.
    """
    place = path.parent.resolve() / path.name
    if place in including:
        chain = " includes ".join(file.name for file in (*including, place))
        raise FileError([Problem(name, None, "include", f"Files include each other: {chain}.")])
    reason = includes.find_problem(path, len(including))
    if reason is not None:
        raise FileError([Problem(name, None, "", reason)])
    parsed = parse_file(place if including else place.resolve(), name, includes.bytes_left)
    includes.bytes_left -= max(parsed.size, MIN_SIZE)
    own = ConfigTree(name, parsed.values, {key: (name, line) for key, line in parsed.lines.items()})
    merged = ConfigTree(name, {}, {})
    problems = ProblemList()
    for key, include in _pop_includes(own, includes.environment, problems):
        given = user_path(include)  # an absolute one replaces the folder
        file, included_name = path.parent / given, str(Path(name).parent / given)
        try:
            _merge_tree(merged, _merge_includes(file, included_name, includes, (*including, place)))
        except FileError as error:
            for problem in error.problems:
                has_place = problem.line is not None or problem.key
                text = f"'{problem.file}': {problem.text}"
                problems.append(problem if has_place else own.problem(key, text))
        except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have
            problems.append(own.problem(key, f"{format_value(include)} cannot be read ({error})."))
    problems.raise_any()
    _merge_tree(merged, own)
    return merged


def _pop_includes(
    tree: ConfigTree, environment: Mapping[str, str], problems: ProblemList
) -> list[tuple[Key, str]]:
    """Remove `include` from a tree; return the key and the name of each file."""
    includes = ConfigTree(tree.file, {"include": tree.values.pop("include", None)}, tree.places)
    try:
        resolve_references(includes, environment)
    except FileError as error:
        problems.extend(error.problems)
        return []
    given = includes.values["include"]
    names: list[Any] = [] if given is None else given if isinstance(given, list) else [given]
    found: list[tuple[Key, str]] = []
    for i, name in enumerate(names):
        key: Key = ("include", i) if isinstance(given, list) else ("include",)
        if isinstance(name, str) and name and "://" not in name:
            found.append((key, name))
        else:
            text = f"It is {format_value(name)}; expected the name of a file."
            problems.append(tree.problem(key, text))
    return found


def _merge_tree(base: ConfigTree, over: ConfigTree) -> None:
    base.values = _merge_values(base, base.values, over.values, ())
    base.places.update(over.places)


def _merge_values(base: ConfigTree, old: Any, new: Any, key: Key) -> Any:
    """Merge mappings, and replace everything else, also the arguments of another class."""
    are_mappings = isinstance(old, dict) and isinstance(new, dict)
    if not are_mappings or (
        "class_path" in new and "class_path" in old and new["class_path"] != old["class_path"]
    ):
        base.forget_places(key, old)
        return new
    merged = dict(old)
    for name, value in new.items():
        is_known = name in old
        merged[name] = _merge_values(base, old[name], value, (*key, name)) if is_known else value
    return merged


# -- overrides ------------------------------------------------------------------------------------


def parse_override(text: str) -> tuple[Key, Any]:
    """Return the key and the value of `hooks.0.every=5`; the value is parsed as YAML."""
    name, equals, value_text = str.__str__(text).partition("=")
    parts = split_key(name.strip())
    if not equals or not all(parts):
        raise ValueError(
            f"{_show(text)} is not a valid override. Expected key=value, such as "
            "trainer.max_epochs=3 or hooks.0.every=5."
        )
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"{_show(text)} has more than {MAX_DEPTH} parts.")
    try:
        value = parse_value(value_text)
    except ValueError as error:
        raise ValueError(f"The value in {_show(text)} cannot be parsed. {error}") from None
    if value is None and value_text.strip() not in _NULLS:  # such as an unset shell variable
        raise ValueError(
            f"{_show(text)} has no value. To set it to null, write {name.strip()}=null."
        )
    return tuple(parts), value


def _show(override: str) -> str:
    return format_value(mask_arguments([override])[0])


def _apply_override(tree: ConfigTree, text: str) -> None:
    """Set a value, creating the mappings that lead to it; raise `ValueError` if it cannot be."""
    parts, value = parse_override(text)
    parent: Any = {"": tree.values}
    last: str | int = ""
    key: Key = ()
    for part in map(str, parts):
        current: Any = parent[last]
        if current is None:
            current = parent[last] = {}
        elif isinstance(current, str) and key:  # the short form of a mapping
            current = parent[last] = {"name" if key[0] == "hooks" else "class_path": current}
        if isinstance(current, list):
            parent, last = current, _parse_index(current, part, key)
        elif isinstance(current, dict):
            if part not in current:
                current[part] = None
                tree.places[*key, part] = (COMMAND_LINE, None)
            parent, last = current, part
        else:
            raise ValueError(  # noqa: TRY004 - an invalid override, like all others
                f"'{format_key(parts)}' cannot be set: '{format_key(key)}' is "
                f"{format_value(current, key)}, which has no keys."
            )
        key = (*key, last)
    tree.forget_places(key, parent[last])
    parent[last] = value
    tree.places[key] = (COMMAND_LINE, None)


def _parse_index(items: list[Any], part: str, key: Key) -> int:
    if not (part.isascii() and part.isdigit() and len(part) < 9 and int(part) < len(items)):
        raise ValueError(
            f"'{format_key(key)}' is a list of {len(items)} without an item '{part}'. Expected an "
            f"index below {len(items)}, counted from 0."
        )
    return int(part)
