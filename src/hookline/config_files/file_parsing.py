"""YAML, TOML and JSON files as the same plain values, with the line of each key.

YAML is read by the rules of version 1.2: `no` and `on` are strings, `1e-3` is a number, and a date
is a string. Keys are strings in all three, a key that stands twice is an error, and nothing but
plain values can be written.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from hookline.config_files.problems import FileError, Key, Problem, shown
from hookline.errors import listed, nearest

__all__ = ["SUFFIXES", "Read", "read_file", "read_value"]

SUFFIXES = (".yaml", ".yml", ".toml", ".json")
_DEEPEST = 40
_MOST = 100_000  # values: aliases in YAML can make more of them than memory holds
_MERGE = "tag:yaml.org,2002:merge"


@dataclass
class Read:
    """What stands in a file: its values, and the line of each key."""

    values: Any
    lines: dict[Key, int] = field(default_factory=dict[Key, int])


class _BadError(Exception):
    """Why a text cannot be read, and in which line."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.text, self.line = text, line


def read_file(path: Path, name: str | None = None) -> Read:
    """Return what stands in a file: a mapping.

    Args:
        path: the file.
        name: what messages call it.

    Raises:
        FileError: it cannot be read; the message has the line where that is known.
    """
    name = str(path) if name is None else name
    try:
        read: Read = _readers(path)(_text(path))
        if read.values is None:
            read.values = {}  # an empty file
        if not isinstance(read.values, dict):
            raise _BadError(f"It holds {shown(read.values)}; expected a mapping of sections.")
        read.values.pop("$schema", None)  # for editors
    except _BadError as error:
        raise FileError([Problem(name, error.line, "", error.text)]) from None
    return read


def read_value(text: str) -> Any:
    """Return a value that is written as YAML, such as `3`, `1e-3`, `[a, b]` or `{lr: 0.1}`.

    Raises:
        ValueError: it is none.
    """
    try:
        return _read_yaml(text).values
    except _BadError as error:
        raise ValueError(error.text) from None


def _readers(path: Path) -> Any:
    suffix = path.suffix.lower()
    readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": _read_json}
    if suffix not in readers:
        raise _BadError(
            f"Its name ends in '{suffix}'.{nearest(suffix, SUFFIXES)} Expected one of "
            f"{listed(SUFFIXES)}; a Python file is named with a function, "
            "`train.py:make_trainer`."
        )
    return readers[suffix]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _BadError(f"It is not written in UTF-8 ({error}).") from None
    except FileNotFoundError:
        hint = ""
        if path.parent.is_dir():
            hint = nearest(path.name, [p.name for p in path.parent.iterdir()])
        raise _BadError(f"There is no such file.{hint}") from None
    except (OSError, ValueError) as error:
        raise _BadError(f"It cannot be read ({error}).") from None


# -- YAML -----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain scalars by the rules of YAML 1.2."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - as PyYAML declares it


for _tag, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": r"<<",
}.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), None
    )


def _read_yaml(text: str) -> Read:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            walk = _YamlWalk(loader)
            values = None if node is None else walk.value(node, ())
            return Read(values, walk.lines)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(part for part in (error.context, error.problem) if part)
        hint = " Indent with spaces: YAML has no tabs there." if r"'\t'" in said else ""
        raise _BadError(
            f"It is not YAML: {said}.{hint}", None if mark is None else mark.line + 1
        ) from None
    except yaml.YAMLError as error:
        raise _BadError(f"It is not YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise _BadError(_TOO_DEEP) from None


class _YamlWalk:
    """Makes values of YAML's nodes, and remembers the lines of keys."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._flat: set[int] = set()
        self._count = 0
        self.lines: dict[Key, int] = {}

    def value(self, node: Any, key: Key) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(key, line)
        self._count += 1
        if self._count > _MOST:
            raise _BadError(f"It holds more than {_MOST:,} values.", line)
        if len(key) > _DEEPEST:
            raise _BadError(_TOO_DEEP, line)
        if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
            return [self.value(one, (*key, i)) for i, one in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        raise _BadError(f"The tag {_tag_text(node.tag)} is not understood.", line)

    def _mapping(self, node: Any, key: Key) -> dict[str, Any]:
        if id(node) not in self._flat:
            self._flat.add(id(node))
            _check_twice(node)
            self._loader.flatten_mapping(node)  # `<<`, whose keys come first and lose
        found: dict[str, Any] = {}
        for name, value in node.value:
            part = _key_text(name)
            self.lines[*key, part] = name.start_mark.line + 1
            found[part] = self.value(value, (*key, part))
        return found


def _check_twice(node: Any) -> None:
    seen: dict[str, int] = {}
    for name, _ in node.value:
        if name.tag == _MERGE:
            continue
        part, line = _key_text(name), name.start_mark.line + 1
        if part in seen:
            raise _BadError(f"The key '{part}' stands twice, first in line {seen[part]}.", line)
        seen[part] = line


def _key_text(node: Any) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _BadError("A key is a list or a mapping; expected a name.", node.start_mark.line + 1)
    return str(node.value)


def _scalar(node: Any) -> Any:
    text: str = node.value
    kind = node.tag.rpartition(":")[2]
    try:
        if kind in ("str", "merge"):
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if kind == "float":
            return float(text.replace(".inf", "inf").replace(".nan", "nan").lower())
    except (ValueError, KeyError):
        raise _BadError(f"{shown(text)} is no {kind}.", node.start_mark.line + 1) from None
    raise _BadError(f"The tag {_tag_text(node.tag)} is not understood.", node.start_mark.line + 1)


def _tag_text(tag: Any) -> str:
    return f"'{str(tag).replace('tag:yaml.org,2002:', '!!')}'"


# -- TOML -----------------------------------------------------------------------------------------


def _read_toml(text: str) -> Read:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", str(error))
        said = str(error).replace(at[0], "") if at else str(error)
        line = None if at is None else int(at[1] or len(text.splitlines()))
        raise _BadError(f"It is not TOML: {said}.", line) from None
    except (RecursionError, ValueError) as error:
        raise _BadError(f"It is not TOML: {error}.") from None
    try:
        return Read(_plain(values), dict(_toml_lines(text)))
    except RecursionError:
        raise _BadError(_TOO_DEEP) from None


_TOML_KEY = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_TOML_KEYS = rf"{_TOML_KEY}(?:\s*\.\s*{_TOML_KEY})*"
_TOML_TABLE = re.compile(rf"^\s*(\[\[?)\s*({_TOML_KEYS})\s*\]")
_TOML_PAIR = re.compile(rf"^\s*({_TOML_KEYS})\s*=")


def _toml_lines(text: str) -> Iterator[tuple[Key, int]]:
    """The lines of tables and of the pairs in them; what stands within a value has no line."""
    table: Key = ()
    counts: dict[Key, int] = {}
    open_quotes = ""
    for number, line in enumerate(text.splitlines(), 1):
        if open_quotes:
            open_quotes = "" if open_quotes in line else open_quotes
            continue
        head, pair = _TOML_TABLE.match(line), _TOML_PAIR.match(line)
        if head is not None:
            table = _in_arrays(_toml_parts(head[2]), counts)
            if head[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            yield table, number
        elif pair is not None:
            yield (*table, *_toml_parts(pair[1])), number
        for quotes in ('"""', "'''"):
            if line.count(quotes) % 2:
                open_quotes = quotes


def _toml_parts(keys: str) -> Key:
    return tuple(part.strip("\"'") for part in re.findall(_TOML_KEY, keys))


def _in_arrays(parts: Key, counts: dict[Key, int]) -> Key:
    """A table's key, with the number of the item it belongs to where that is in an array."""
    key: Key = ()
    for i, part in enumerate(parts):
        key = (*key, part)
        if key in counts and i < len(parts) - 1:
            key = (*key, counts[key])
    return key


# -- JSON -----------------------------------------------------------------------------------------


def _read_json(text: str) -> Read:
    try:
        values = json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        raise _BadError(f"It is not JSON: {error.msg}.", error.lineno) from None
    except (RecursionError, ValueError) as error:
        raise _BadError(f"It is not JSON: {error}.") from None
    try:
        values = _plain(values)
        lines: dict[Key, int] = {}
        _JsonLines(text, lines).value(0, ())
        return Read(values, lines)
    except RecursionError:
        raise _BadError(_TOO_DEEP) from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key '{name}' stands twice")
        found[name] = value
    return found


class _JsonLines:
    """Goes through JSON that is known to be valid, for the lines of its keys."""

    _SPACE = re.compile(r"[ \t\n\r]*")
    _ATOM = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s,\]}]+')

    def __init__(self, text: str, lines: dict[Key, int]) -> None:
        self._text, self._lines = text, lines
        self._line, self._counted = 1, 0

    def value(self, at: int, key: Key) -> int:
        """Go through the value that begins here; return where it ends."""
        at = self._skip(at)
        self._lines.setdefault(key, self._line_of(at))
        sign = self._text[at]
        if sign not in "{[":
            return self._atom(at)[1]
        at, index = self._skip(at + 1), 0
        while self._text[at] not in "]}":
            part: str | int = index
            if sign == "{":
                word, end = self._atom(at)
                part = json.loads(word)
                self._lines[*key, part] = self._line_of(at)
                at = self._skip(end) + 1  # the colon
            at, index = self._skip(self.value(at, (*key, part))), index + 1
            at = self._skip(at + 1) if self._text[at] == "," else at
        return at + 1

    def _skip(self, at: int) -> int:
        found = self._SPACE.match(self._text, at)
        return at if found is None else found.end()

    def _atom(self, at: int) -> tuple[str, int]:
        found = self._ATOM.match(self._text, at)
        return ("", at + 1) if found is None else (found[0], found.end())

    def _line_of(self, at: int) -> int:
        self._line += self._text.count("\n", self._counted, at)
        self._counted = at
        return self._line


# -- what all three have in common ----------------------------------------------------------------

_TOO_DEEP = f"It is nested more than {_DEEPEST} deep."


def _plain(value: Any, depth: int = 0) -> Any:
    """Values as all three formats have them: TOML's dates and times become strings."""
    if depth > _DEEPEST:
        raise _BadError(_TOO_DEEP)
    if isinstance(value, dict):
        return {name: _plain(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, depth + 1) for one in value]
    return value.isoformat() if isinstance(value, datetime | date | time) else value
