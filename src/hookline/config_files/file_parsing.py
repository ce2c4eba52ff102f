"""YAML, TOML and JSON files, parsed to the same plain values with the line of each key.

YAML follows the rules of version 1.2: `no` and `on` are strings, `1e-3` is a number, and a date is
a string. In all three formats keys are strings, and a duplicate key is an error.
"""

from __future__ import annotations

import json
import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from hookline.config_files.config_tree import FileError, Key, Problem, format_value
from hookline.errors import listed, nearest

__all__ = ["MAX_DEPTH", "MAX_VALUES", "ParsedFile", "parse_file", "parse_value"]

MAX_DEPTH = 40
MAX_VALUES = 100_000  # YAML aliases can multiply values until memory is full
_TOO_DEEP = f"Values are nested more than {MAX_DEPTH} levels deep."
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass
class ParsedFile:
    """The values of a file, and the line of each key."""

    values: Any
    lines: dict[Key, int] = field(default_factory=dict[Key, int])


class _ParseError(Exception):
    """Why a text cannot be parsed, and the line if it is known."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.text, self.line = text, line


def parse_file(path: Path, name: str | None = None) -> ParsedFile:
    """Return the values of a file, which are a mapping; `name` is the file's name in messages.

    Raises:
        FileError: the file cannot be read or parsed.
    """
    name = str(path) if name is None else name
    try:
        parsed = _parser(path)(_read_text(path))
        if parsed.values is None:
            parsed.values = {}  # an empty file
        if not isinstance(parsed.values, dict):
            found = format_value(parsed.values)
            raise _ParseError(f"The file contains {found}; expected a mapping of sections.")
        parsed.values.pop("$schema", None)  # only for editors
    except _ParseError as error:
        raise FileError([Problem(name, error.line, "", error.text)]) from None
    return parsed


def parse_value(text: str) -> Any:
    """Return a value written as YAML, such as `3`, `1e-3`, `[a, b]` or `{lr: 0.1}`.

    Raises:
        ValueError: the text is not valid YAML.
    """
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


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _ParseError(f"The file is not encoded in UTF-8 ({error}).") from None
    except FileNotFoundError:
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise _ParseError(f"There is no such file.{nearest(path.name, names)}") from None
    except (OSError, ValueError) as error:
        raise _ParseError(f"The file cannot be read ({error}).") from None


# -- YAML -----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader that resolves plain scalars by the rules of YAML 1.2."""

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


def _parse_yaml(text: str) -> ParsedFile:
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            constructor = _YamlConstructor(loader)
            values = None if root is None else constructor.construct(root, ())
            return ParsedFile(values, constructor.lines)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        reason = _explain_yaml(error, text.split("\n"))
        raise _ParseError(f"Not valid YAML: {reason}", line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reason = f"the character {chr(error.character)!r} is not allowed"
        raise _ParseError(f"Not valid YAML: {reason}.", line) from None
    except RecursionError:
        raise _ParseError(_TOO_DEEP) from None


def _explain_yaml(error: yaml.MarkedYAMLError, lines: list[str]) -> str:
    """Return what is wrong and how to fix it; for rare mistakes, what the parser says."""
    context, problem = error.context or "", error.problem or ""
    mark = error.problem_mark
    in_words = f"{context} {problem}.".lstrip()
    if mark is None or mark.line >= len(lines):  # YAML knows more line breaks
        return in_words
    start = error.context_mark or mark
    if r"'\t'" in problem:
        return "Indent with spaces: YAML does not allow tabs."
    if "cannot start any token" in problem or "scanning an alias" in context:
        at = start if "scanning an alias" in context else mark
        first = lines[at.line][at.column : at.column + 1]
        return f"A value that begins with '{first}' needs quotes."
    if "quoted scalar" in context and "end of stream" in problem:
        return f"The quote in line {start.line + 1} is not closed."
    if "flow mapping" in context or "flow sequence" in context:
        bracket = "{" if "mapping" in context else "["
        return f"The '{bracket}' in line {start.line + 1} is not closed, or a comma is missing."
    above = [i for i in range(mark.line) if lines[i].split("#")[0].strip()]
    last = above[-1] if above else mark.line
    indent, last_indent = (len(lines[i]) - len(lines[i].lstrip()) for i in (mark.line, last))
    if "block collection" in context and mark.column == start.column:
        return (
            "A key follows a list at the indentation of its items. If it belongs to the last item, "
            f"indent it by {start.column + 2} spaces."
        )
    if "mapping values are not allowed" in problem:
        if re.match(r"[\s-]*\w+:[^\s/]", lines[last]):
            return f"Line {last + 1} needs a space after the colon."
        if indent <= last_indent:
            return "A value that contains ': ' needs quotes."
    elif "<block end>" not in problem:
        return in_words
    return (
        f"The line is indented by {indent} spaces, which does not match the lines above it "
        f"({last_indent} in line {last + 1}). Keys of one mapping need the same indentation."
    )


class _YamlConstructor:
    """Constructs plain values from YAML nodes, and collects the lines of keys."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._flattened: set[int] = set()
        self._count = 0
        self.lines: dict[Key, int] = {}

    def construct(self, node: Any, key: Key) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(key, line)
        self._count += 1
        if self._count > MAX_VALUES:
            raise _ParseError(f"The file contains more than {MAX_VALUES:,} values.", line)
        if len(key) > MAX_DEPTH:
            raise _ParseError(_TOO_DEEP, line)
        if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
            return [self.construct(item, (*key, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        raise _unknown_tag(node)

    def _mapping(self, node: Any, key: Key) -> dict[str, Any]:
        if id(node) not in self._flattened:
            self._flattened.add(id(node))
            _check_duplicates(node)
            self._loader.flatten_mapping(node)  # puts the keys of `<<` first, so that others win
        mapping: dict[str, Any] = {}
        for name_node, value in node.value:
            name = _key_text(name_node)
            self.lines[*key, name] = name_node.start_mark.line + 1
            mapping[name] = self.construct(value, (*key, name))
        return mapping


def _check_duplicates(node: Any) -> None:
    seen: dict[str, int] = {}
    for name_node, _ in node.value:
        if name_node.tag == _MERGE_TAG:
            continue
        name, line = _key_text(name_node), name_node.start_mark.line + 1
        if name in seen:
            raise _ParseError(f"Duplicate key '{name}', first given in line {seen[name]}.", line)
        seen[name] = line


def _key_text(node: Any) -> str:
    if not isinstance(node, yaml.ScalarNode):
        line = node.start_mark.line + 1
        raise _ParseError("A key is a list or a mapping; expected a string.", line)
    return str(node.value)


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "merge": str,
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10),
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan").lower()),
}


def _scalar(node: Any) -> Any:
    kind = node.tag.rpartition(":")[2]
    if kind not in _SCALARS:
        raise _unknown_tag(node)
    try:
        return _SCALARS[kind](node.value)
    except (ValueError, KeyError):
        text = f"{format_value(node.value)} is not a valid {kind}."
        raise _ParseError(text, node.start_mark.line + 1) from None


def _unknown_tag(node: Any) -> _ParseError:
    tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
    return _ParseError(f"Unknown tag '{tag}'.", node.start_mark.line + 1)


# -- JSON -----------------------------------------------------------------------------------------


def _parse_json(text: str) -> ParsedFile:
    try:
        values = _to_plain(json.loads(text, object_pairs_hook=_unique_pairs))
    except json.JSONDecodeError as error:
        raise _ParseError(f"Not valid JSON: {error.msg}.", error.lineno) from None
    except (RecursionError, ValueError) as error:
        raise _ParseError(f"Not valid JSON: {error}.") from None
    try:
        # YAML includes JSON, apart from tabs, which JSON does not allow within strings.
        return ParsedFile(values, _parse_yaml(text.replace("\t", " ")).lines)
    except _ParseError:  # rare characters that only JSON allows: no lines
        return ParsedFile(values)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for name, value in pairs:
        if name in mapping:
            raise _ParseError(f"Duplicate key '{name}'.")
        mapping[name] = value
    return mapping


# -- TOML -----------------------------------------------------------------------------------------


def _parse_toml(text: str) -> ParsedFile:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _ParseError(f"Not valid TOML: {error}.", _toml_error_line(text)) from None
    except (RecursionError, ValueError) as error:
        raise _ParseError(f"Not valid TOML: {error}.") from None
    return ParsedFile(_to_plain(values), _toml_lines(text))


def _toml_lines(text: str) -> dict[Key, int]:
    """Return the line of each key of a valid text: the first line of its statement."""
    lines: dict[Key, int] = {}
    table: Key = ()
    indices: dict[Key, int] = {}  # of the last item of each array of tables
    for start, statement in _toml_statements(text):
        parsed = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            *_, path = _paths(parsed)
            names = tuple(part for part in path if isinstance(part, str))
            table = _with_indices(names, indices)
            if len(names) < len(path):  # `[[name]]`, parsed as a list
                indices[table] = indices.get(table, -1) + 1
                table = (*table, indices[table])
            lines[table] = start
        else:
            for path in _paths(parsed):
                lines.setdefault((*table, *path), start)
    return lines


def _toml_error_line(text: str) -> int:
    """Return the first line of the first statement that makes a text invalid."""
    statements = list(_toml_statements(text))
    ends = [start + statement.count("\n") - 1 for start, statement in statements]
    lines = text.split("\n")
    first = bisect_left(ends, True, key=lambda end: not _is_toml("\n".join(lines[:end])))
    return statements[first][0]


def _toml_statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each table header, key and value, comment or blank line, with its first line number.

    A statement that is not valid is extended by the next line: arrays and strings may go on over
    several lines, and are only valid when they are closed. Invalid statements go on to the end.
    """
    statement, start = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        statement += line + "\n"
        if _is_toml(statement):
            yield start, statement
            statement, start = "", number + 1
    if statement:
        yield start, statement


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _paths(value: Any, path: Key = ()) -> Iterator[Key]:
    """Yield the path of each value within a value, outer before inner."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        yield (*path, name)
        if isinstance(inner, dict | list):
            yield from _paths(inner, (*path, name))


def _with_indices(names: tuple[str, ...], indices: dict[Key, int]) -> Key:
    """Return the key of a table, with the index of each array of tables that it is in."""
    key: Key = ()
    for i, name in enumerate(names):
        key = (*key, name)
        if key in indices and i < len(names) - 1:
            key = (*key, indices[key])
    return key


def _to_plain(value: Any, depth: int = 0) -> Any:
    """Return values as all formats have them: TOML's dates and times become strings."""
    if depth > MAX_DEPTH:
        raise _ParseError(_TOO_DEEP)
    if isinstance(value, dict):
        return {name: _to_plain(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_to_plain(inner, depth + 1) for inner in value]
    return value.isoformat() if isinstance(value, datetime | date | time) else value
