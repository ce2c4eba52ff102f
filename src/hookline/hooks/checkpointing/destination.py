"""Where copies of checkpoints go: a folder, or any filesystem that fsspec knows.

A copy is made under a temporary name and compared with what it was made from. Only then does it
get its name, `manifest.json` last of all: a part of a copy is never taken for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import xxhash

from hookline.checkpoint.atomic_files import (
    TEMPORARY,
    hash_file,
    remove_leftovers,
    sync,
    temporary_folder,
)
from hookline.checkpoint.checkpoint_lookup import read_manifest
from hookline.errors import CheckpointError, ConfigError

__all__ = ["Bundle", "Destination", "Folder", "Remote", "StoppedError", "destination_of"]

_CHUNK = 1 << 22
_MANIFEST = "manifest.json"


class StoppedError(Exception):
    """There is no more time: the copy is given up."""


@dataclass(frozen=True)
class Item:
    """One file of a checkpoint, with what its copy has to match."""

    name: str
    source: Path
    size: int
    hash: str

    @classmethod
    def of(cls, name: str, source: Path) -> Item:
        """Measure a file that no manifest describes."""
        return cls(name, source, source.stat().st_size, hash_file(source))


@dataclass(frozen=True)
class Bundle:
    """A checkpoint as files, the manifest last; or whatever a bare loop wrote as a checkpoint."""

    name: str
    items: tuple[Item, ...]
    is_folder: bool

    @classmethod
    def of(cls, path: Path) -> Bundle:
        """List the files of a checkpoint.

        Raises:
            CheckpointError: Its manifest is damaged.
            FileNotFoundError: It is not there any more.
        """
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist.")
        if path.is_file():
            return cls(path.name, (Item.of(path.name, path),), is_folder=False)
        try:
            facts = read_manifest(path)["files"]
        except CheckpointError:
            if (path / "state.json").exists():
                raise
            files = sorted(p for p in path.rglob("*") if p.is_file())
            items = [Item.of(p.relative_to(path).as_posix(), p) for p in files]
        else:
            items = [Item(n, path / n, f["size"], f["xxh3_64"]) for n, f in facts.items()]
            items.append(Item.of(_MANIFEST, path / _MANIFEST))
        return cls(path.name, tuple(items), is_folder=True)

    def names(self) -> Iterator[str]:
        """The name, and others for when something else has it."""
        stem, dot, ending = (self.name, "", "") if self.is_folder else self.name.partition(".")
        yield self.name
        yield from (f"{stem}_{number}{dot}{ending}" for number in count(2))

    def path_of(self, item: Item, name: str) -> str:
        """Where an item of this bundle is, when the bundle has this name."""
        return f"{name}/{item.name}" if self.is_folder else name


class Destination(Protocol):
    """Somewhere to copy checkpoints to."""

    def upload(self, bundle: Bundle, under: str, is_stopped: Callable[[], bool]) -> str:
        """Copy and verify; return where the copy is. What is there already stays as it is."""
        ...


def destination_of(address: str | Path) -> Destination:
    """Return the destination of an address: a folder's path, or a URL such as `s3://bucket`."""
    text = str(address)
    return Remote(text) if "://" in text else Folder(Path(text))


class Folder:
    """A folder on this machine, or one that is mounted here."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser()

    def upload(self, bundle: Bundle, under: str, is_stopped: Callable[[], bool]) -> str:
        """Copy into a temporary folder, verify, rename."""
        parent = self._root / under
        parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(parent)
        with temporary_folder(parent, bundle.name) as temporary:
            copy = temporary / bundle.name
            if bundle.is_folder:
                copy.mkdir()
            for item in bundle.items:
                target = temporary / bundle.path_of(item, bundle.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    _copy(item.source, file, is_stopped)
                sync(target)
                _compare(item, str(target), target.stat().st_size, hash_file(target))
            sync(copy)
            final = self._place(bundle, copy, parent)
        sync(parent)
        return str(final)

    def _place(self, bundle: Bundle, copy: Path, parent: Path) -> Path:
        for name in bundle.names():
            final = parent / name
            if not final.exists():
                return copy.rename(final)
            if self._is_there(bundle, parent, name):
                return final
        raise AssertionError

    def _is_there(self, bundle: Bundle, parent: Path, name: str) -> bool:
        paths = [(item, parent / bundle.path_of(item, name)) for item in bundle.items]
        return all(p.is_file() and hash_file(p) == item.hash for item, p in paths)


class Remote:
    """A filesystem of fsspec: object stores and many more."""

    def __init__(self, url: str) -> None:
        self._url = url
        protocol = url.partition("://")[0].rpartition("::")[2]
        try:
            _fsspec().get_filesystem_class(protocol)
        except ImportError as error:
            missing = f"fsspec needs another package for it ({error})"
            if getattr(error, "name", None) == "fsspec":
                missing = "that needs fsspec: pip install fsspec"
            raise ConfigError(f"Checkpoints are to be copied to {url}: {missing}.") from error
        except ValueError as error:
            raise ConfigError(
                f"Checkpoints are to be copied to {url}, but fsspec knows no '{protocol}': {error}"
            ) from error

    def upload(self, bundle: Bundle, under: str, is_stopped: Callable[[], bool]) -> str:
        """Copy under a temporary name, verify, move file by file, the manifest last."""
        fs, root = _fsspec().url_to_fs(self._url)
        parent = "/".join(part for part in (root.rstrip("/"), under) if part)
        temporary = f"{parent}/{TEMPORARY}{bundle.name}"
        fs.invalidate_cache()
        try:
            for item in bundle.items:
                target = f"{temporary}/{item.name}"
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                with fs.open(target, "wb") as file:
                    _copy(item.source, file, is_stopped)
                _compare(item, target, fs.info(target)["size"], _remote_digest(fs, target))
            name = self._place(fs, bundle, temporary, parent)
        finally:
            with suppress(Exception):  # the first error matters more
                fs.rm(temporary, recursive=True)
        return "/".join(part for part in (self._url.rstrip("/"), under, name) if part)

    def _place(self, fs: Any, bundle: Bundle, temporary: str, parent: str) -> str:
        for name in bundle.names():
            final = f"{parent}/{name}"
            if fs.exists(final) and not _is_unfinished(fs, bundle, final):
                if self._is_there(fs, bundle, parent, name):
                    return name
                continue
            for item in bundle.items:
                target = f"{parent}/{bundle.path_of(item, name)}"
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                fs.mv(f"{temporary}/{item.name}", target)
                size = fs.info(target)["size"]
                _compare(item, target, size, item.hash)  # it was read before it was moved
            return name
        raise AssertionError

    def _is_there(self, fs: Any, bundle: Bundle, parent: str, name: str) -> bool:
        paths = [(item, f"{parent}/{bundle.path_of(item, name)}") for item in bundle.items]
        return all(fs.isfile(p) and _remote_digest(fs, p) == item.hash for item, p in paths)


def _fsspec() -> Any:
    return import_module("fsspec")  # only here: whoever copies to a folder does without


def _is_unfinished(fs: Any, bundle: Bundle, final: str) -> bool:
    """Whether an upload that was cut off left this: files, but no manifest yet."""
    ours = bundle.is_folder and any(item.name == _MANIFEST for item in bundle.items)
    return ours and not fs.isfile(final) and not fs.exists(f"{final}/{_MANIFEST}")


def _copy(source: Path, target: Any, is_stopped: Callable[[], bool]) -> None:
    with source.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if is_stopped():
                raise StoppedError
            target.write(chunk)


def _remote_digest(fs: Any, path: str) -> str:
    state = xxhash.xxh3_64()
    with fs.open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def _compare(item: Item, target: str, size: int, found: str) -> None:
    if size != item.size:
        raise OSError(f"{target} has {size} bytes, and {item.source} has {item.size}.")
    if found != item.hash:
        raise OSError(f"{target} has other bytes than {item.source} was written with.")
