"""Destinations for copies of checkpoints: a folder, or any filesystem that fsspec supports.

A copy is made under a temporary name, compared with the original, and then renamed, with
`manifest.json` last: an incomplete copy is never mistaken for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from hookline.arguments import user_path
from hookline.checkpoint.atomic_files import (
    TEMPORARY,
    hash_file,
    hash_stream,
    remove_leftovers,
    sync,
    temporary_folder,
)
from hookline.checkpoint.checkpoint_lookup import read_manifest
from hookline.checkpoint.remote import import_fsspec
from hookline.errors import CheckpointError
from hookline.files.plain_names import is_plain_name
from hookline.files.regular_files import open_regular_file
from hookline.printable import printable

__all__ = ["Bundle", "Destination", "Folder", "Item", "Remote", "StoppedError", "destination_of"]

_CHUNK = 1 << 22
_MANIFEST = "manifest.json"


class StoppedError(Exception):
    """The copy was aborted, because the time for it is over."""


@dataclass(frozen=True)
class Item:
    """A file of a checkpoint, with the size and hash that its copy must have."""

    name: str
    source: Path
    size: int
    hash: str

    @classmethod
    def of(cls, name: str, source: Path) -> Item:
        """Return an item for a file that is not in a manifest."""
        return cls(name, source, source.stat().st_size, hash_file(source))


@dataclass(frozen=True)
class Bundle:
    """The files of a checkpoint, the manifest last; also of one that a bare loop has written."""

    name: str
    items: tuple[Item, ...]
    is_folder: bool

    @classmethod
    def of(cls, path: Path) -> Bundle:
        """Return the files of a checkpoint.

        Raises:
            CheckpointError: Its manifest is damaged.
            FileNotFoundError: It was removed.
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
            files = sorted(p for p in path.rglob("*") if p.is_file())  # of the user's own loop
            items = [Item.of(p.relative_to(path).as_posix(), p.resolve()) for p in files]
        else:
            items = [Item(n, path / n, f["size"], f["xxh3_64"]) for n, f in facts.items()]
            items.append(Item.of(_MANIFEST, path / _MANIFEST))
        return cls(path.name, tuple(items), is_folder=True)

    def names(self) -> Iterator[str]:
        """Yield the name, then alternatives in case it is taken."""
        stem, dot, ending = (self.name, "", "") if self.is_folder else self.name.partition(".")
        yield self.name
        yield from (f"{stem}_{number}{dot}{ending}" for number in count(2))

    def path_of(self, item: Item, name: str) -> str:
        """Return the path of an item if the bundle has this name."""
        return f"{name}/{item.name}" if self.is_folder else name


class Destination(Protocol):
    """A place to copy checkpoints to."""

    def upload(self, bundle: Bundle, under: str, is_stopped: Callable[[], bool]) -> str:
        """Copy and verify; return the path of the copy. Existing files are not overwritten."""
        ...


def destination_of(address: str | Path) -> Destination:
    """Return the destination for a folder's path, or a URL such as `s3://bucket`."""
    text = str(address)
    return Remote(text) if "://" in text else Folder(Path(text))


class Folder:
    """A local or mounted folder."""

    def __init__(self, root: Path) -> None:
        self._root = user_path(root).absolute()

    def upload(self, bundle: Bundle, under: str, is_stopped: Callable[[], bool]) -> str:
        """Copy into a temporary folder, verify, rename."""
        _check_name(under)
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
            if self._has_copy(bundle, parent, name):
                return final
        raise AssertionError

    def _has_copy(self, bundle: Bundle, parent: Path, name: str) -> bool:
        paths = [(item, parent / bundle.path_of(item, name)) for item in bundle.items]
        return all(
            p.is_file() and not p.is_symlink() and hash_file(p) == item.hash for item, p in paths
        )


class Remote:
    """A filesystem of fsspec, such as an object store."""

    def __init__(self, url: str) -> None:
        self._url = url
        import_fsspec(url, "Checkpoints cannot be copied to")

    def upload(self, bundle: Bundle, under: str, is_stopped: Callable[[], bool]) -> str:
        """Copy under a temporary name, verify, and move file by file, the manifest last."""
        _check_name(under)
        fs, root = import_fsspec(self._url, "Checkpoints cannot be copied to").url_to_fs(self._url)
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
            with suppress(Exception):  # keep the first error
                fs.rm(temporary, recursive=True)
        return "/".join(part for part in (self._url.rstrip("/"), under, name) if part)

    def _place(self, fs: Any, bundle: Bundle, temporary: str, parent: str) -> str:
        for name in bundle.names():
            final = f"{parent}/{name}"
            if fs.exists(final) and not _is_unfinished(fs, bundle, final):
                if self._has_copy(fs, bundle, parent, name):
                    return name
                continue
            for item in bundle.items:
                target = f"{parent}/{bundle.path_of(item, name)}"
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                fs.mv(f"{temporary}/{item.name}", target)
                size = fs.info(target)["size"]
                _compare(item, target, size, item.hash)  # its hash was checked before it was moved
            return name
        raise AssertionError

    def _has_copy(self, fs: Any, bundle: Bundle, parent: str, name: str) -> bool:
        paths = [(item, f"{parent}/{bundle.path_of(item, name)}") for item in bundle.items]
        return all(fs.isfile(p) and _remote_digest(fs, p) == item.hash for item, p in paths)


def _is_unfinished(fs: Any, bundle: Bundle, final: str) -> bool:
    """Return whether this is left from an interrupted upload: files without a manifest."""
    ours = bundle.is_folder and any(item.name == _MANIFEST for item in bundle.items)
    return ours and not fs.isfile(final) and not fs.exists(f"{final}/{_MANIFEST}")


def _check_name(under: str) -> None:
    """Raise unless the folder for copies is the destination itself or a plain name in it."""
    if under and not is_plain_name(under):
        raise CheckpointError(
            f"The id of the run is '{printable(under)}', which is not a plain name: nothing is "
            "copied to the destination."
        )


def _copy(source: Path, target: Any, is_stopped: Callable[[], bool]) -> None:
    with open_regular_file(source) as file:
        while chunk := file.read(_CHUNK):
            if is_stopped():
                raise StoppedError
            target.write(chunk)


def _remote_digest(fs: Any, path: str) -> str:
    with fs.open(path, "rb") as file:
        return hash_stream(file)


def _compare(item: Item, target: str, size: int, found: str) -> None:
    if size != item.size:
        raise OSError(f"{target} has {size} bytes, but {item.source} has {item.size}.")
    if found != item.hash:
        raise OSError(f"{target} differs from what was written to {item.source}.")
