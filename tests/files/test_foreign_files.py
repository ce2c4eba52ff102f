"""Files from elsewhere: what is opened, which names are plain, and how text is shown."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hookline.errors import ConfigError
from hookline.files import (
    FileLimits,
    FileRefusedError,
    is_plain_name,
    open_handle,
    read_regular_file,
)
from hookline.printable import escape_controls, printable

BIDI_MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fifo", "a FIFO"), ("link", "a symbolic link"), ("folder", "a folder"), ("sock", "a socket")],
)
def test_only_regular_files_are_opened(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "sock"))
        with pytest.raises(FileRefusedError, match=f"{name} is {kind}"):
            read_regular_file(tmp_path / name, 100)
    for flags in (os.O_RDWR | os.O_APPEND, os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
        with pytest.raises(FileRefusedError):
            open_handle(tmp_path / "link", flags)
    assert (tmp_path / "secret").read_text() == "secret"


def test_devices_are_not_opened() -> None:
    with pytest.raises(FileRefusedError, match="zero is a device"):
        read_regular_file("/dev/zero", 100)


def test_the_size_is_limited(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert read_regular_file(file, 100) == b"x" * 100
    with pytest.raises(FileRefusedError, match="more than 99 bytes"):
        read_regular_file(file, 99)


def test_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_regular_file(tmp_path / "file", 99)


def test_limits_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKLINE_MAX_MANIFEST_BYTES", "1_000")
    assert FileLimits.from_environment() == FileLimits(manifest_bytes=1000)
    for wrong in ("many", "-1", "9" * 5000):
        monkeypatch.setenv("HOOKLINE_MAX_LINE_BYTES", wrong)
        with pytest.raises(ConfigError, match="HOOKLINE_MAX_LINE_BYTES is '"):
            FileLimits.from_environment()


@pytest.mark.parametrize("name", ["step_000120", "last", "best-1.5", "20261115-210655-3f9c7b"])
def test_plain_names(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".hidden", "../x", "a/b", "a\\b", "/etc", "C:x", "a\0", "a\n", "nul"),
        *("COM1.txt", "a" * 201, "ä", None, 5, ["a"]),
    ],
)
def test_names_that_are_not_plain(name: object) -> None:
    assert not is_plain_name(name)


def test_escapes_can_be_read_and_long_text_is_cut() -> None:
    assert printable("a\x1b[31m\u202e\n") == r"a\x1b[31m\u202e\n"
    assert printable("x" * 50, 10) == "x" * 9 + "…"
    assert escape_controls("a\n\tb\x07") == "a\n\tb\\x07"
    assert printable("Übung 模型 👩‍💻") == "Übung 模型 👩‍💻"
