"""The lines of the keys of a TOML text, which `tomllib` does not report."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from hookline.config_files.config_tree import Key

__all__ = ["find_error_line", "find_key_lines", "has_deep_key"]

# Each pattern passes over a text once: repetitions are possessive.
_STRING = r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"|' + r"'[^'\n]*+'"
_TOKEN = re.compile(r'#[^\n]*+|"""|' + rf"'''|{_STRING}|[\[\]{{}}\n]")
_END_OF_STRING = {'"""': re.compile(r'\\.|"{3,5}', re.DOTALL), "'''": re.compile(r"'{3,5}")}
_PART = rf"(?:[\w-]++|{_STRING})"
_LINE = re.compile(r"\(at line (\d+),")


def has_deep_key(text: str, depth: int) -> bool:
    """Return whether a key has more parts than this; `tomllib` takes minutes for a long one."""
    dotted = rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{depth}}}"
    return text.count(".") >= depth and re.search(dotted, text) is not None


def find_key_lines(text: str) -> dict[Key, int]:
    """Return the line of each key of a valid text: the first line of its statement."""
    lines: dict[Key, int] = {}
    table: Key = ()
    indices: dict[Key, int] = {}  # of the last item of each array of tables
    for start, statement in _split_statements(text):
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


def _split_statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each table header, key and value, comment or blank line, with its first line number.

    A statement ends with its line, unless a bracket or a string is still open.
    """
    line, start, position, open_brackets = 1, 0, 0, 0
    while found := _TOKEN.search(text, position):
        token, position = found[0], found.end()
        if token in _END_OF_STRING:
            position = _find_end(text, position, token)
        elif token in "[{":
            open_brackets += 1
        elif token in "]}":
            open_brackets -= 1
        elif token == "\n" and open_brackets <= 0:
            statement = text[start:position]
            yield line, statement
            line, start, open_brackets = line + statement.count("\n"), position, 0
    if start < len(text):
        yield line, text[start:]


def _find_end(text: str, start: int, quotes: str) -> int:
    """Return where a string of several lines ends; the end of the text if it is not closed."""
    for found in _END_OF_STRING[quotes].finditer(text, start):
        if not found[0].startswith("\\"):
            return found.end()
    return len(text)


def find_error_line(text: str, error: tomllib.TOMLDecodeError) -> int:
    """Return the first line of the statement that an error is in."""
    found = _LINE.search(str(error))
    last = int(found[1]) if found is not None else None  # None: at the end of the text
    first = 1
    for line, _ in _split_statements(text):
        if last is not None and line > last:
            break
        first = line
    return first
