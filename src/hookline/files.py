"""Files that anybody may have written: opened safely, named plainly, read as strict JSON.

A link could lead out of a folder, a FIFO would block for ever, a device would never end: only
regular files are opened, links are not followed, and a file that is too large is refused.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, cast

from hookline.errors import ConfigError

_PREFIX = "HOOKLINE_MAX_"


# -- how large they may be -------------------------------------------------------------------------


@dataclass
class FileLimits:
    """Sizes in bytes above which a file is refused, so that a hostile one cannot fill the memory.

    `hookline.file_limits` is in force. Its attributes can be set, or, before the process starts,
    environment variables such as `HOOKLINE_MAX_MANIFEST_BYTES=200_000_000`.

    Attributes:
        manifest_bytes: Manifest of a run or of a checkpoint, or pointer.
        line_bytes: One line of a log of metrics or events.
        state_bytes: `state.json` of a checkpoint, and the header of a safetensors file.
        config_bytes: Config file.
        hole_bytes: What the files of a checkpoint have without data on the disk: reading it takes
            time and memory, and a sparse file of any size is quickly sent.
    """

    manifest_bytes: int = 64 << 20
    line_bytes: int = 16 << 20
    state_bytes: int = 1 << 30
    config_bytes: int = 4 << 20
    hole_bytes: int = 4 << 30

    @classmethod
    def from_environment(cls) -> FileLimits:
        """Return the default limits with those that environment variables set."""
        values: dict[str, int] = {}
        for field in fields(cls):
            variable = _PREFIX + field.name.upper()
            text = os.environ.get(variable)
            if text is None:
                continue
            with suppress(ValueError):
                values[field.name] = int(text)
            if values.get(field.name, 0) <= 0:
                raise ConfigError(
                    f"The environment variable {variable} is {text!r}. Expected a number of bytes."
                )
        return cls(**values)


file_limits = FileLimits.from_environment()
"""The limits in force."""


# -- plain names, which stay in their folder -------------------------------------------------------

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")
# Windows opens devices by these names, with any suffix.
_DEVICES = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)


def is_plain_name(name: Any) -> TypeGuard[str]:
    """Return whether a value is a plain file name: letters, digits and `._=+-`, up to 200."""
    return isinstance(name, str) and bool(_PLAIN.fullmatch(name)) and not _DEVICES.fullmatch(name)


# -- regular files ---------------------------------------------------------------------------------

# Windows has neither. O_NONBLOCK: opening a FIFO does not wait for its writer.
_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)


class FileRefusedError(OSError):
    """The file is a link, not a regular file, or too large."""


def open_handle(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file as `os.open` does; anything else, and links, are refused."""
    name = Path(path).name
    try:
        handle = os.open(path, flags | _FLAGS, mode)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        refused = describe_kind(path)
        if refused is None:
            raise
        raise FileRefusedError(f"{name} is {refused}; expected a regular file") from error
    try:
        kind = _name_kind(os.fstat(handle).st_mode)
        if kind is not None:
            raise FileRefusedError(f"{name} is {kind}; expected a regular file")
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_regular_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; see `open_handle` for what is refused."""
    return os.fdopen(open_handle(path), "rb")


def read_regular_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the contents of a regular file; one of more than `max_bytes` is refused, too."""
    contents = b""
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= max_bytes:
            # Not as much as is allowed: a buffer of that size would be allocated.
            contents = file.read(size + 1)
            if len(contents) > size:  # it has grown meanwhile
                contents += file.read(max_bytes + 1 - len(contents))
    if max(size, len(contents)) > max_bytes:
        raise FileRefusedError(
            f"{Path(path).name} has more than {max_bytes:,} bytes; hookline.file_limits allows more"
        )
    return contents


def count_hole_bytes(file: BinaryIO, more_than: int) -> int:
    """Return how many bytes of a file have no data on the disk; it stops above a number."""
    size, position, holes = os.fstat(file.fileno()).st_size, 0, 0
    if size <= more_than or not hasattr(os, "SEEK_DATA"):  # Windows
        return 0
    while position < size and holes <= more_than:
        try:
            data = os.lseek(file.fileno(), position, os.SEEK_DATA)
            position, holes = os.lseek(file.fileno(), data, os.SEEK_HOLE), holes + data - position
        except OSError as error:
            return holes + size - position if error.errno == errno.ENXIO else holes
    return holes


def describe_kind(path: str | os.PathLike[str]) -> str | None:
    """Return what a path is if it is not a regular file; None also if there is nothing."""
    try:
        return _name_kind(os.lstat(path).st_mode)
    except OSError:
        return None


def _name_kind(mode: int) -> str | None:
    """Return what a file is if it is not a regular file."""
    if stat.S_ISREG(mode):
        return None
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


# -- JSON from elsewhere: standard JSON in UTF-8, of a depth that every function can walk ----------

MAX_DEPTH = 200
"""How deeply lists and objects may be nested."""

MAX_STATE_DEPTH = 400
"""The same for the state of a checkpoint, which has up to three levels for each level of a dict."""


def parse_json(data: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON in UTF-8. Python's parser accepts more than the standard: NaN,
            numbers above the range of floats, keys that occur twice, halves of surrogate pairs.
    """
    try:
        value = _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError(f"it is nested deeper than {max_depth} levels") from None
    if data.count(b"[") + data.count(b"{") > max_depth:
        _check_depth(value, max_depth)
    if b"\\u" in data:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text has half of a surrogate pair") from None
    return value


def _check_depth(value: Any, max_depth: int) -> None:
    level = [value]
    for _ in range(max_depth + 1):
        level = [inner for item in level for inner in _contents(item)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {max_depth} levels")


def _contents(item: Any) -> list[Any]:
    """Return the lists and objects that a value contains."""
    values = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [one for one in cast("list[Any]", values) if isinstance(one, dict | list)]


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is above the range of floats")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not standard JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_make_object, parse_float=_parse_float, parse_constant=_refuse_constant
)
