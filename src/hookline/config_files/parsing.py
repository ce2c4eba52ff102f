"""YAML, TOML and JSON files, parsed to the same plain values; YAML and JSON with lines of keys.

YAML follows the rules of version 1.2: `no` and `on` are strings, `1e-3` is a number, and a date is
a string. In all three formats keys are strings, and a duplicate key is an error.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
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
_MERGE_TAG = "tag:yaml.org,2002:merge"
_QUOTES = "A value that begins with '*', '@', '%' or '`' needs quotes."
_YAML_HINTS = {  # by what the parser says
    r"'\t'": "Indent with spaces: YAML does not allow tabs.",
    "alias": _QUOTES,
    "cannot start any token": _QUOTES,
    "quoted scalar": "A quote is not closed.",
    "flow mapping": "A '{' is not closed, or a comma is missing.",
    "flow sequence": "A '[' is not closed, or a comma is missing.",
    "mapping values are not allowed": "The line is indented more than those above it, a space is "
    "missing after a colon, or a value that contains ': ' needs quotes.",
    "<block end>": "The line is indented otherwise than those above it. Keys of one mapping, and "
    "items of one list, need the same indentation.",
}
_TOML_PART = r"""(?:[\w-]++|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"|'[^'\n]*+')"""
_DEEP_TOML_KEY = re.compile(
    rf"(?<![\w-]){_TOML_PART}(?:[ \t]*+\.[ \t]*+{_TOML_PART}){{{MAX_DEPTH}}}"
)


@dataclass
class ParsedFile:
    """The values of a file, the line of each key (None in TOML), and the number of bytes."""

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
    """A loader that resolves plain scalars by the rules of YAML 1.2, and stops at the limits."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - as PyYAML declares it

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes_left = 2 * MAX_VALUES + 1  # keys are nodes, too
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; PyYAML calls this for each node."""
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise _too_many(self.get_mark().line + 1)
        if self._depth > MAX_DEPTH:
            raise _ParseError(_TOO_DEEP, self.get_mark().line + 1)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


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
            constructor = _YamlConstructor()
            values = None if root is None else constructor.construct(root, ())
            return ParsedFile(values, constructor.lines)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        found = _find_missing_colon(error, text.splitlines())
        reason, line = found or (_explain_yaml(error), line)
        raise _ParseError(f"Not valid YAML: {reason}", line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reason = f"the character {chr(error.character)!r} is not allowed"
        raise _ParseError(f"Not valid YAML: {reason}.", line) from None
    except RecursionError:
        raise _ParseError(_TOO_DEEP) from None


def _find_missing_colon(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[str, int] | None:
    """Return that a key lacks its colon, and its line; None if something else is wrong."""
    problem, stopped, started = error.problem or "", error.problem_mark, error.context_mark
    lines = [line.split("#")[0].strip() for line in lines]
    if stopped is None or "flow" in (error.context or ""):
        return None
    if "could not find expected ':'" in problem and started is not None:
        line = started.line
    elif "mapping values are not allowed" in problem or "<document start>" in problem:
        # The parser took the line for the continuation of the one above, which is no key.
        line = max((i for i in range(stopped.line) if lines[i]), default=stopped.line)
    else:
        return None
    key = re.match(r"(- *)?([\w.-]+)(?: |$)", lines[line])
    if key is None or ":" in lines[line] or lines[line].endswith((",", "[", "{")):
        return None
    dash, name = key.groups()
    expected = f"`- name: {name}`" if dash and lines[line].endswith(name) else f"`{name}: …`"
    return f"There is no colon in {format_value(lines[line])}; expected {expected}.", line + 1


def _explain_yaml(error: yaml.MarkedYAMLError) -> str:
    """Return what is wrong and how to fix it; for rare mistakes, what the parser says."""
    in_words = f"{error.context or ''} {error.problem or ''}.".lstrip()
    return next((hint for words, hint in _YAML_HINTS.items() if words in in_words), in_words)


class _YamlConstructor:
    """Constructs plain values from YAML nodes, and collects the lines of keys."""

    def __init__(self) -> None:
        self._pairs: dict[int, dict[str, tuple[Any, Any]] | None] = {}
        self._values_left = MAX_VALUES
        self.lines: dict[Key, int | None] = {}

    def construct(self, node: Any, key: Key) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(key, line)
        self._count(line)
        if len(key) > MAX_DEPTH:
            raise _ParseError(_TOO_DEEP, line)
        if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
            return [self.construct(item, (*key, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node, key)
        raise _unknown_tag(node, key)

    def _count(self, line: int) -> None:
        self._values_left -= 1
        if self._values_left < 0:
            raise _too_many(line)

    def _mapping(self, node: Any, key: Key) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for name, (name_node, value) in self._merged_pairs(node).items():
            line = name_node.start_mark.line
            if isinstance(value, yaml.ScalarNode):
                line = max(line, value.start_mark.line)  # of an alias, it is that of the anchor
            self.lines[*key, name] = line + 1
            mapping[name] = self.construct(value, (*key, name))
        return mapping

    def _merged_pairs(self, node: Any) -> dict[str, tuple[Any, Any]]:
        """Return the keys and values of a mapping, with those of the mappings in its `<<`."""
        line = node.start_mark.line + 1
        known = self._pairs.setdefault(id(node), None)
        if known is not None:
            return known
        own: dict[str, tuple[Any, Any]] = {}
        merged: dict[str, tuple[Any, Any]] = {}
        for name_node, value in node.value:
            if name_node.tag == _MERGE_TAG:
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if self._pairs.get(id(source), own) is None:
                        raise _ParseError("A mapping merges itself with `<<`.", line)
                    if not isinstance(source, yaml.MappingNode):
                        raise _ParseError("`<<` needs a mapping, or a list of mappings.", line)
                    for name, pair in self._merged_pairs(source).items():
                        self._count(line)
                        merged.setdefault(name, pair)
                continue
            name, name_line = _key_text(name_node), name_node.start_mark.line + 1
            if name in own:
                first = own[name][0].start_mark.line + 1
                text = f"Duplicate key '{name}', first given in line {first}."
                raise _ParseError(text, name_line)
            own[name] = name_node, value
        self._pairs[id(node)] = pairs = merged | own
        return pairs


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
    "int": lambda text: _check_integer(int(text, 0 if text[:2] in ("0o", "0x") else 10)),
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan").lower()),
}


def _scalar(node: Any, key: Key) -> Any:
    kind = node.tag.rpartition(":")[2]
    if kind not in _SCALARS:
        raise _unknown_tag(node, key)
    try:
        return _SCALARS[kind](node.value)
    except (ValueError, KeyError):
        text = f"{format_value(node.value, key)} is not a valid {kind}."
        if kind == "int" and len(node.value) > 500:
            text += " It has too many digits."
        raise _ParseError(text, node.start_mark.line + 1) from None


def _unknown_tag(node: Any, key: Key) -> _ParseError:
    tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
    return _ParseError(f"Unknown tag {format_value(tag, key)}.", node.start_mark.line + 1)


# -- JSON -----------------------------------------------------------------------------------------


def _parse_json(text: str) -> ParsedFile:
    try:
        parsed = _to_plain(parse_json(text.encode()))
    except json.JSONDecodeError as error:
        raise _ParseError(f"Not valid JSON: {error.msg}.", error.lineno) from None
    except ValueError as error:
        raise _ParseError(f"Not valid JSON: {error}.") from None
    # YAML includes JSON, apart from tabs, which JSON does not allow within strings, and from rare
    # characters that only JSON allows: then there are no lines.
    with suppress(_ParseError):
        parsed.lines = _parse_yaml(text.replace("\t", " ")).lines
    return parsed


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
