"""UploadHook: copies checkpoints to another place in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat

from hookline.arguments import user_path
from hookline.checkpoint.atomic_files import TEMPORARY, hash_file, hash_stream, sync
from hookline.checkpoint.catalog import read_manifest
from hookline.errors import CheckpointError, ConfigError
from hookline.files import is_plain_name, open_regular_file
from hookline.hook import HookGroup
from hookline.hooks.background_worker import BackgroundWorker
from hookline.loop.loop import loop_of
from hookline.options import BuiltIn

log = logging.getLogger("hookline")

_CHUNK = 1 << 22
_MANIFEST = "manifest.json"
_MAX_WAITING = 8  # checkpoints
_PAUSE = 1.0  # seconds before the first retry; they double for each further one


class UploadHook(BuiltIn):
    """Copies every checkpoint to a folder or a URL, in the background, and verifies the copy.

    The copy is `<destination>/<run id>/<checkpoint>`. It is written under a temporary name, read
    back, compared with the hashes in the checkpoint's manifest, and then renamed. A failed copy is
    retried; if it still fails, that is logged, and training continues. Checkpoints that are removed
    before they are copied are skipped, which is logged, and so is the oldest if more than eight
    wait. Copies are never removed.

    Args:
        destination: a folder, or a URL that fsspec supports, such as `s3://bucket/runs`.
        retries: how often a failed copy is retried.
        timeout: seconds to wait for pending copies at the end of training; after a signal such as
            SIGTERM no longer than `checkpoints.grace_seconds` allows, 30 by default.
    """

    hookline_group = HookGroup.WRITER
    ranks = "main"
    cost = (
        "Nothing on the training thread; a second thread reads, writes and hashes each checkpoint."
    )

    def __init__(
        self,
        destination: str | Path,
        retries: NonNegativeInt = 3,
        timeout: PositiveFloat = 600.0,
    ) -> None:
        self._destination = Destination(str(destination))
        self._retries, self._timeout = retries, timeout
        self._worker: BackgroundWorker[tuple[Path, str]] | None = None
        self._has_ended = False
        self._reset()

    def _reset(self) -> None:
        self.uploaded: dict[Path, str] = {}
        """The paths of the copies, by checkpoint."""
        self.failed: list[Path] = []
        """The checkpoints that could not be copied."""
        self.skipped: list[Path] = []
        """The checkpoints that were removed before the copy, or dropped as too many waited."""

    # -- events -----------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        self._has_ended = False
        self._reset()

    def on_checkpoint_save(self, trainer: Any, checkpoint_path: Any) -> None:
        """Queue the checkpoint for copying; after training, wait until it is copied."""
        if self._worker is None:
            self._worker = BackgroundWorker("hookline-upload", self._copy, _MAX_WAITING)
        run = getattr(trainer, "run", None)
        under = "" if run is None else run.id
        for path, _ in self._worker.add((Path(checkpoint_path), under)):
            log.warning("Too many checkpoints are waiting to be copied: %s is skipped.", path)
            self.skipped.append(path)
        if self._has_ended:  # by `trainer.save_checkpoint` after `fit`: no event comes any more
            self._wait_for_copies(trainer)

    def on_train_end(self, trainer: Any = None) -> None:
        self._has_ended = True
        self._wait_for_copies(trainer)

    def _wait_for_copies(self, trainer: Any) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        loop = loop_of(trainer)
        before_kill = None if loop is None else loop.requests.seconds_before_kill()
        seconds = self._timeout if before_kill is None else min(self._timeout, before_kill)
        if waiting := len(worker):
            log.info("Waiting for %d checkpoints to be copied, for %g seconds.", waiting, seconds)
        # It checks between chunks whether it is stopped; a hanging network call takes longer.
        if left := [path for path, _ in worker.end(seconds, grace=1.0)]:
            self.failed += left
            log.error(
                "%d checkpoints were not copied within %.3g seconds%s: %s. The originals are kept.",
                len(left),
                seconds,
                "" if before_kill is None else ", because a signal has ended training",
                ", ".join(map(str, left)),
            )

    # -- on the worker's thread -------------------------------------------------------------------

    def _copy(self, item: tuple[Path, str], stop: threading.Event) -> None:
        """Copy a checkpoint with retries, and add it to one of the lists."""
        path, under = item
        for attempt in range(self._retries + 1):
            try:
                bundle = Bundle.of(path)
                self.uploaded[path] = self._destination.upload(bundle, under, stop.is_set)
            except _StoppedError:
                break
            except Exception as error:  # anything that a network or a disk may raise
                if not path.exists():
                    log.info("%s was removed before it was copied.", path)
                    self.skipped.append(path)
                    return
                last = attempt == self._retries or isinstance(error, CheckpointError)
                log.log(
                    logging.ERROR if last else logging.WARNING,
                    "%s could not be copied (%s: %s)%s",
                    path,
                    type(error).__name__,
                    error,
                    "; training continues." if last else "; it will be retried.",
                )
                if last or stop.wait(_PAUSE * 2**attempt):
                    break
            else:
                log.info("%s was copied to %s.", path, self.uploaded[path])
                return
        if stop.is_set():
            log.error("%s was not copied: the timeout was reached.", path)
        if path not in self.failed:  # on_train_end may have added it already
            self.failed.append(path)


# -- the destination ------------------------------------------------------------------------------
#
# A copy is made under a temporary name, compared with the original, and then renamed, with
# `manifest.json` last: an incomplete copy is never mistaken for a checkpoint.


class _StoppedError(Exception):
    """The copy was aborted, because the time for it is over."""


@dataclass(frozen=True)
class _File:
    """A file of a checkpoint, with the hash that its copy must have.

    The name is relative to the checkpoint's folder; "" for a checkpoint that is a file.
    """

    name: str
    source: Path
    hash: str

    def below(self, root: str) -> str:
        """Return the file's path in a checkpoint of this path."""
        return f"{root}/{self.name}" if self.name else root


@dataclass(frozen=True)
class Bundle:
    """The files of a checkpoint, the manifest last; also of a checkpoint of another library."""

    name: str
    files: tuple[_File, ...]

    @classmethod
    def of(cls, path: Path) -> Bundle:
        """Return the files of a checkpoint."""
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist.")
        if path.is_file():
            return cls(path.name, (_File("", path, hash_file(path)),))
        try:
            facts = read_manifest(path)["files"]
        except CheckpointError:
            if (path / "state.json").exists():
                raise
            paths = {p.relative_to(path).as_posix(): p.resolve() for p in sorted(path.rglob("*"))}
            files = [_File(n, p, hash_file(p)) for n, p in paths.items() if p.is_file()]
        else:
            files = [_File(name, path / name, fact["xxh3_64"]) for name, fact in facts.items()]
            files.append(_File(_MANIFEST, path / _MANIFEST, hash_file(path / _MANIFEST)))
        return cls(path.name, tuple(files))


class Destination:
    """A folder, or a URL of an object store, through fsspec. Existing files are not overwritten."""

    def __init__(self, address: str) -> None:
        self._is_local = "://" not in address
        self._address = str(user_path(address).absolute()) if self._is_local else address
        self._import_fsspec()

    def _import_fsspec(self) -> Any:
        """Return the module fsspec, if it supports the URL's protocol."""
        url = "file://" if self._is_local else self._address
        try:
            fsspec: Any = import_module("fsspec")  # here, because few training runs need it
            fsspec.get_filesystem_class(url.partition("://")[0].rpartition("::")[2])
        except (ImportError, ValueError) as error:
            is_missing = getattr(error, "name", None) == "fsspec"
            why = "this needs fsspec: pip install fsspec" if is_missing else str(error)
            raise ConfigError(f"Checkpoints cannot be copied to {url}: {why}.") from error
        return fsspec

    def upload(self, bundle: Bundle, under: str, is_stopped: Callable[[], bool]) -> str:
        """Copy under a temporary name, verify, and move file by file, the manifest last."""
        if under and not is_plain_name(under):
            raise CheckpointError(f"The id of the run is '{under}', which is not a plain name.")
        fsspec, root = self._import_fsspec(), self._address
        fs, root = (fsspec.filesystem("file"), root) if self._is_local else fsspec.url_to_fs(root)
        parent = f"{root.rstrip('/')}/{under}".rstrip("/")
        temporary = f"{parent}/{TEMPORARY}{bundle.name}"
        fs.invalidate_cache()
        try:
            for file in bundle.files:
                target = file.below(temporary)
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                with fs.open(target, "wb") as copy:
                    _copy(file.source, copy, is_stopped)
                self._sync(target)
                if _digest(fs, target) != file.hash:
                    raise OSError(f"{target} differs from what was written to {file.source}.")
            name = self._place(fs, bundle, temporary)
        finally:
            with suppress(Exception):  # keep the first error
                fs.rm(temporary, recursive=True)
        self._sync(parent)
        return "/".join(part for part in (self._address.rstrip("/"), under, name) if part)

    def _place(self, fs: Any, bundle: Bundle, temporary: str) -> str:
        """Move the files to a name that is free, or has this copy already; return the name."""
        parent = temporary.rpartition("/")[0]
        is_file = [file.name for file in bundle.files] == [""]
        is_ours = any(file.name == _MANIFEST for file in bundle.files)
        stem, dot, ending = bundle.name.partition(".") if is_file else (bundle.name, "", "")
        number, name = 1, bundle.name
        while fs.exists(final := f"{parent}/{name}"):
            if is_ours and fs.isdir(final) and not fs.exists(f"{final}/{_MANIFEST}"):
                break  # left from an interrupted upload
            if all(_has_copy(fs, file.below(final), file) for file in bundle.files):
                return name
            number += 1
            name = f"{stem}_{number}{dot}{ending}"
        for file in bundle.files:
            folder = file.below(final).rpartition("/")[0]
            fs.makedirs(folder, exist_ok=True)
            fs.mv(file.below(temporary), file.below(final))
            self._sync(folder)
        return name

    def _sync(self, path: str) -> None:
        """Have a file or folder survive a power failure: the original may be removed afterwards."""
        if self._is_local:
            sync(Path(path))


def _has_copy(fs: Any, path: str, file: _File) -> bool:
    is_regular = fs.isfile(path) and not fs.info(path).get("islink")
    return is_regular and _digest(fs, path) == file.hash


def _copy(source: Path, target: Any, is_stopped: Callable[[], bool]) -> None:
    with open_regular_file(source) as file:
        while chunk := file.read(_CHUNK):
            if is_stopped():
                raise _StoppedError
            target.write(chunk)


def _digest(fs: Any, path: str) -> str:
    with fs.open(path, "rb") as file:
        return hash_stream(file)
