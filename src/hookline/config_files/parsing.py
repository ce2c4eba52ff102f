"""YAML, TOML and JSON files, parsed to the same plain values; YAML with the lines of keys.

YAML follows the rules of version 1.2: `no` and `on` are strings, `1e-3` is a number, and a date is
a string. In all three formats keys are strings, and a duplicate key is an error.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from hookline.config_files.tree import FileError, Key, Problem, format_value
from hookline.errors import listed, nearest
from hookline.files import file_limits, open_regular_file, parse_json

MAX_DEPTH = 40
MAX_VALUES = 20_000  # a second to parse; YAML aliases can multiply values until memory is full
MIN_SIZE = 4096
"""The bytes that a smaller file counts as: a few files can include each other very often."""
_MAX_BITS = 3_322  # of an integer: 1,000 digits
_TOO_DEEP = f"Values are nested more than {MAX_DEPTH} levels deep."
_TOML_PART = r"""(?:[\w-]++|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"|'[^'\n]*+')"""
_DEEP_TOML_KEY = re.compile(
    rf"(?<![\w-]){_TOML_PART}(?:[ \t]*+\.[ \t]*+{_TOML_PART}){{{MAX_DEPTH}}}"
)


@dataclass
class ParsedFile:
    """The values of a file, the line of each key (in YAML), and the number of bytes."""

    values: Any
    lines: dict[Key, int | None] = field(default_factory=dict[Key, int | None])
    size: int = 0


class _ParseError(Exception):
    """Why a text cannot be parsed, and the line if it is known."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.text, self.line = text, line


def parse_file(path: Path, name: str, max_bytes: int) -> ParsedFile:
    """Return the values of a file, which are a mapping; `name` is its name in messages."""
    try:
        parse = _parser(Path(name))
        contents = _read(path, max_bytes)
        parsed = parse(_decode(contents))
        if parsed.values is None:
            parsed.values = {}  # an empty file
        if not isinstance(parsed.values, dict):
            found = format_value(parsed.values)
            raise _ParseError(f"The file contains {found}; expected a mapping of sections.")
        parsed.values.pop("$schema", None)  # only for editors
        parsed.size = len(contents)
    except _ParseError as error:
        raise FileError([Problem(name, error.line, "", error.text)]) from None
    return parsed


def parse_value(text: str) -> Any:
    """Return a value written as YAML, such as `1e-3` or `{lr: 0.1}`; raise ValueError."""
    try:
        return _parse_yaml(text).values
    except _ParseError as error:
        raise ValueError(error.text) from None


def _parser(path: Path) -> Callable[[str], ParsedFile]:
    parsers = {
        ".yaml": _parse_yaml,
        ".yml": _parse_yaml,
        ".toml": _parse_toml,
        ".json": _parse_json,
    }
    suffix = path.suffix.lower()
    if suffix not in parsers:
        raise _ParseError(
            f"Unknown file type '{suffix}'.{nearest(suffix, parsers)} Expected one of "
            f"{listed(parsers)}, or a function in a Python file, `train.py:make_trainer`."
        )
    return parsers[suffix]


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        with open_regular_file(path) as file:
            contents = file.read(max_bytes + 1)
    except FileNotFoundError:
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise _ParseError(f"There is no such file.{nearest(path.name, names)}") from None
    except (OSError, ValueError) as error:
        raise _ParseError(f"The file cannot be read ({error}).") from None
    if len(contents) > max_bytes:
        limit = file_limits.config_bytes
        raise _ParseError(
            f"The file, with those that it is included by and with, has more than {limit:,} bytes "
            f"(each counts as {MIN_SIZE:,} or more). hookline.file_limits.config_bytes allows more."
        )
    return contents


def _decode(contents: bytes) -> str:
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _ParseError(f"The file is not encoded in UTF-8 ({error}).") from None


def _too_many(line: int | None = None) -> _ParseError:
    return _ParseError(f"The configuration contains more than {MAX_VALUES:,} values.", line)


# -- YAML -----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader that resolves plain scalars by the rules of YAML 1.2, and stops at a limit."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - as PyYAML declares it
    _nodes_left = 2 * MAX_VALUES + 1  # keys are nodes, too

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; PyYAML calls this for each node."""
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise _too_many(self.get_mark().line + 1)
        return super().compose_node(parent, index)


for _tag, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), None
    )


def _parse_yaml(text: str) -> ParsedFile:
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
        parsed = ParsedFile(None)
        parsed.values = None if root is None else _construct(root, (), parsed.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = f"{error.context or ''} {error.problem or ''}".strip()
        if "alias" in reason:  # its name may be a secret that begins with an asterisk
            reason = "an alias (*) has no anchor (&); a text that begins with * needs quotes"
        line = None if mark is None else mark.line + 1
        raise _ParseError(f"Not valid YAML: {reason}.", line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reason = f"the character {chr(error.character)!r} is not allowed"
        raise _ParseError(f"Not valid YAML: {reason}.", line) from None
    except RecursionError:
        raise _ParseError(_TOO_DEEP) from None
    return parsed


def _construct(node: Any, key: Key, lines: dict[Key, int | None]) -> Any:
    """Return the plain value of a node, and add the lines of its keys."""
    line = _line(node)
    if isinstance(node, yaml.ScalarNode) or key not in lines:  # else the line of the key counts
        line = lines[key] = max(line, lines.get(key) or 0)  # that of an alias is its anchor's
    if len(lines) > MAX_VALUES:  # aliases can multiply them
        raise _too_many(line)
    if len(key) > MAX_DEPTH:
        raise _ParseError(_TOO_DEEP, line)
    kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
    if isinstance(node, yaml.MappingNode) and kind == "map":
        pairs = _pairs(node, key, lines)
        return {name: _construct(value, (*key, name), lines) for name, value in pairs.items()}
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        return [_construct(item, (*key, i), lines) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.ScalarNode) or kind not in _SCALARS:
        shown = kind if kind == node.tag else f"!!{kind}"
        raise _ParseError(f"Unknown tag {format_value(shown, key)}.", line)
    try:
        return _SCALARS[kind](node.value)
    except (ValueError, KeyError):
        digits = " It has too many digits." if len(node.value) > 500 else ""
        text = f"{format_value(node.value, key)} is not a valid {kind}.{digits}"
        raise _ParseError(text, line) from None


def _pairs(node: Any, key: Key, lines: dict[Key, int | None]) -> dict[str, Any]:
    """Return the keys of a mapping with the nodes of their values."""
    pairs: dict[str, Any] = {}
    for name_node, value in node.value:
        line = _line(name_node)
        if not isinstance(name_node, yaml.ScalarNode):
            raise _ParseError("A key is a list or a mapping; expected a string.", line)
        name = str(name_node.value)
        if name == "<<":
            raise _ParseError("`<<` is not supported. Use `include`, or references.", line)
        if name in pairs:
            first = lines[*key, name]
            raise _ParseError(f"Duplicate key '{name}', first given in line {first}.", line)
        lines[*key, name] = line
        pairs[name] = value
    return pairs


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": lambda text: _check_integer(int(text, 0 if text[:2] in ("0o", "0x") else 10)),
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan").lower()),
}


# -- JSON -----------------------------------------------------------------------------------------


def _parse_json(text: str) -> ParsedFile:
    try:
        return _to_plain(parse_json(text.encode()))
    except json.JSONDecodeError as error:
        raise _ParseError(f"Not valid JSON: {error.msg}.", error.lineno) from None
    except ValueError as error:
        raise _ParseError(f"Not valid JSON: {error}.") from None


# -- TOML -----------------------------------------------------------------------------------------


def _parse_toml(text: str) -> ParsedFile:
    # `tomllib` takes minutes for a key of many parts.
    if text.count(".") >= MAX_DEPTH and _DEEP_TOML_KEY.search(text):
        raise _ParseError(_TOO_DEEP)
    try:
        return _to_plain(tomllib.loads(text))
    except (RecursionError, ValueError) as error:  # a syntax error's message has the line
        raise _ParseError(f"Not valid TOML: {error}.") from None


def _to_plain(value: Any) -> ParsedFile:
    """Return values as all formats have them: TOML's dates and times become strings."""
    keys: dict[Key, int | None] = {}

    def convert(value: Any, key: Key) -> Any:
        keys[key] = None
        if len(keys) > MAX_VALUES:
            raise _too_many()
        if len(key) > MAX_DEPTH:
            raise _ParseError(_TOO_DEEP)
        if isinstance(value, dict):
            return {name: convert(inner, (*key, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [convert(inner, (*key, i)) for i, inner in enumerate(value)]
        if isinstance(value, int):
            return _check_integer(value)
        return value.isoformat() if isinstance(value, datetime | date | time) else value

    return ParsedFile(convert(value, ()), keys)


def _check_integer(value: int) -> int:
    if value.bit_length() > _MAX_BITS:
        raise _ParseError("An integer has more than 1,000 digits.")
    return value
