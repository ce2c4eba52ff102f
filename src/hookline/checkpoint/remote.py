"""Fetching checkpoints from a URL that fsspec supports, such as an object store.

A checkpoint is copied into a temporary folder, compared with the sizes and hashes in its manifest,
and renamed into place.
"""

from __future__ import annotations

import logging
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from hookline.checkpoint.atomic_files import (
    TEMPORARY,
    move_to_free_name,
    numbered_paths,
    remove_leftovers,
    sync,
    temporary_folder,
)
from hookline.checkpoint.catalog import (
    FORMAT,
    MANIFEST,
    InvalidCheckpointError,
    age_key,
    check_files,
    check_hashes,
    check_manifest,
    is_checkpoint_name,
    is_emergency,
    is_weights_only,
    parse_json_file,
    read_manifest,
)
from hookline.errors import CheckpointError, ConfigError
from hookline.files import file_limits, is_plain_name, read_regular_file

log = logging.getLogger("hookline")

_CHUNK = 1 << 22
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._=+-]")
_MAX_NAME = 100


def import_fsspec(url: str, problem: str) -> Any:
    """Return the module fsspec; raise a `ConfigError` if it does not support the URL's protocol."""
    protocol = url.partition("://")[0].rpartition("::")[2]
    try:
        fsspec: Any = import_module("fsspec")  # here, because local folders do not need it
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        missing = f"fsspec needs another package ({error})"
        if getattr(error, "name", None) == "fsspec":
            missing = "this needs fsspec: pip install fsspec"
        raise ConfigError(f"{problem} {url}: {missing}.") from error
    except ValueError as error:
        raise ConfigError(f"{problem} {url}: unknown protocol '{protocol}': {error}") from error
    return fsspec


def fetch_checkpoint(url: str, into: Path) -> Path:
    """Copy a checkpoint from a URL into a folder, verify it, and return the checkpoint's folder.

    If the checkpoint is there already and complete, nothing is copied.

    Args:
        url: The URL of a checkpoint; or of a run's folder or a folder of checkpoints, which stand
            for the newest complete checkpoint in them. Those that were saved after a crash, and
            those that have only the weights, are fetched only by their own URL.
        into: The folder in which the checkpoint's folder is created.
    """
    fs, root = import_fsspec(url, "Checkpoints cannot be fetched from").url_to_fs(url)
    into, root, url = Path(into), root.rstrip("/"), url.rstrip("/")
    try:
        fs.invalidate_cache()
        into.mkdir(parents=True, exist_ok=True)
        remove_leftovers(into)
        return _fetch_newest(fs, root, url, into)
    except CheckpointError:
        raise
    except Exception as error:  # filesystems of fsspec have errors of their own for the network
        raise CheckpointError(f"{url} could not be fetched: {error}") from error


def _fetch_newest(fs: Any, root: str, url: str, into: Path) -> Path:
    single = _RemoteCheckpoint.read(fs, root, url)
    found, damage = [single] if single is not None else [], list[str]()
    if single is None:
        if fs.isdir(f"{root}/checkpoints") and not _is_link(fs.info(f"{root}/checkpoints")):
            root, url = f"{root}/checkpoints", f"{url}/checkpoints"
        found, damage = _list_resumable(fs, root, url)
    for checkpoint in sorted(found, key=lambda one: age_key(one.name, one.manifest), reverse=True):
        try:
            path = checkpoint.fetch(into)
        except CheckpointError as error:
            damage.append(str(error))
            continue
        if damage:
            log.warning("Damaged checkpoints are skipped: %s Using %s.", " ".join(damage), path)
        return path
    raise CheckpointError(
        f"No complete checkpoint at {url}. "
        + (" ".join(damage) or "Give the URL of a checkpoint, of a run or of its checkpoints.")
    )


def _list_resumable(fs: Any, root: str, url: str) -> tuple[list[_RemoteCheckpoint], list[str]]:
    """Return the checkpoints in a folder that a run resumes from, and what is wrong with others."""
    found: list[_RemoteCheckpoint] = []
    damage: list[str] = []
    for name in _list_folders(fs, root):
        try:
            one = _RemoteCheckpoint.read(fs, f"{root}/{name}", f"{url}/{name}")
        except CheckpointError as error:
            damage.append(str(error))
            continue
        if one is not None and not (is_emergency(one.manifest) or is_weights_only(one.manifest)):
            found.append(one)
    return found, damage


def _list_folders(fs: Any, root: str) -> list[str]:
    """Return the names of the folders; those that are unfinished have a dot."""
    try:
        entries = fs.ls(root, detail=True)
    except FileNotFoundError:
        raise CheckpointError(f"{root} does not exist.") from None
    folders = [
        entry["name"] for entry in entries if entry["type"] == "directory" and not _is_link(entry)
    ]
    names = [path.rstrip("/").rpartition("/")[2] for path in folders]
    return sorted(name for name in names if name and not name.startswith((".", TEMPORARY)))


def _is_link(entry: dict[str, Any]) -> bool:
    """Return whether an entry of a filesystem that has links is one."""
    return bool(entry.get("islink")) or entry.get("type") == "link"


def _check_regular(entry: dict[str, Any], url: str) -> None:
    """Raise if an entry is not a regular file: a FIFO would block, a link may lead anywhere."""
    if entry.get("type") != "file" or _is_link(entry):
        kind = "link" if _is_link(entry) else entry.get("type")
        raise CheckpointError(f"{url} is not a regular file, but a {kind}.")


@dataclass(frozen=True)
class _RemoteCheckpoint:
    """A checkpoint at a URL, whose manifest was read and is valid."""

    fs: Any
    root: str
    url: str
    manifest: dict[str, Any]
    manifest_bytes: bytes

    @classmethod
    def read(cls, fs: Any, root: str, url: str) -> _RemoteCheckpoint | None:
        """Return the checkpoint at a path; None if there is no checkpoint's manifest."""
        limit = file_limits.manifest_bytes
        try:
            entry = fs.info(f"{root}/{MANIFEST}")
            if entry.get("type") == "directory":
                return None
            _check_regular(entry, f"{url}/{MANIFEST}")
            data = fs.cat_file(f"{root}/{MANIFEST}", start=0, end=limit + 1)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        if len(data) > limit:
            raise CheckpointError(f"{url}/{MANIFEST} has more than {limit:,} bytes.")
        if FORMAT.encode() not in data:
            return None  # such as the manifest of a run
        try:
            manifest = check_manifest(parse_json_file(MANIFEST, data))
        except InvalidCheckpointError as error:
            raise CheckpointError(f"{url}/{error}.") from error
        return cls(fs, root, url, manifest, data)

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2] or "checkpoint"

    def fetch(self, into: Path) -> Path:
        """Copy the files, verify them, and rename the folder into place."""
        name = _folder_name(self.name)
        for path in takewhile(Path.exists, numbered_paths(into / name)):
            if self._is_copy(path):
                return path
        needed = sum(file["size"] for file in self.manifest["files"].values())
        total, _, free = shutil.disk_usage(into)
        if total and free < needed:  # some network file systems report zeros
            raise CheckpointError(
                f"{self.url} has {needed:,} bytes, and {free:,} are free in {into}."
            )
        with temporary_folder(into, name) as temporary:
            copy = temporary / name
            copy.mkdir()
            for file, expected in self.manifest["files"].items():
                self._fetch_file(file, expected["size"], copy / file)
            try:
                check_files(copy, self.manifest)
                check_hashes(copy, self.manifest)
            except InvalidCheckpointError as error:
                raise CheckpointError(f"{self.url}/{error}.") from error
            (copy / MANIFEST).write_bytes(self.manifest_bytes)
            sync(copy / MANIFEST)
            sync(copy)
            path = move_to_free_name(copy, into / name)
        sync(into)
        return path

    def _is_copy(self, path: Path) -> bool:
        """Return whether a folder is a complete copy of this checkpoint."""
        with suppress(CheckpointError, OSError):
            data = read_regular_file(path / MANIFEST, file_limits.manifest_bytes)
            return data == self.manifest_bytes and bool(read_manifest(path, verify_files=True))
        return False

    def _fetch_file(self, name: str, size: int, target: Path) -> None:
        """Copy a file, not much more than its expected size."""
        try:
            _check_regular(self.fs.info(f"{self.root}/{name}"), f"{self.url}/{name}")
            with self.fs.open(f"{self.root}/{name}", "rb") as source, target.open("wb") as file:
                while file.tell() <= size and (chunk := source.read(_CHUNK)):
                    file.write(chunk)
        except FileNotFoundError:
            raise CheckpointError(f"{self.url}/{name} is missing.") from None
        sync(target)


def _folder_name(name: str) -> str:
    """Return a URL's last part as a plain name of a folder that is neither hidden nor a pointer."""
    plain = _NOT_IN_NAMES.sub("_", name)[:_MAX_NAME]
    return plain if is_plain_name(plain) and is_checkpoint_name(plain) else f"_{plain}"
