"""A run on disk: its manifest, its metrics, its events."""

from __future__ import annotations

import logging
import numbers
import os
import shutil
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch

from hookline.checkpoint.atomic_files import remove_leftovers
from hookline.context import LazyDict, LazyFloat
from hookline.errors import RunError, listed
from hookline.runs.jsonable import number, plain, shown
from hookline.runs.jsonl_file import VERSION, InvalidValue, Journal, JsonlFile, line
from hookline.runs.manifest import new_run_id, now, read_manifest
from hookline.runs.manifest_data import Facts, continued, new_manifest, write_manifest
from hookline.runs.media import histogram, save_image
from hookline.runs.writer_process import is_alive

__all__ = ["Kind", "Run"]

log = logging.getLogger("hookline")

Kind = Literal["scalar", "text", "histogram", "image"]
_KINDS = ("scalar", "text", "histogram", "image")
_RESERVED = ("v", "time", "kind")


class Run:
    """One training and the folder it leaves behind.

    `Run.create` starts a run, `Run.open` reads one or, with `resume=True`, continues it. After
    that no failure to write raises: it is logged once and counted in the manifest's
    `lost_records`, and training goes on.

    A record of `metrics.jsonl`:
    `{"v": 1, "step": 3, "epoch": 0, "time": 1763240815.2, "name": "train/loss", "kind": "scalar",
    "value": 0.5}`. The values by kind:

    - `scalar`: a number. NaN and infinities are the strings "NaN", "Infinity", "-Infinity".
    - `text`: a string.
    - `histogram`: `{"counts": […], "edges": […]}`.
    - `image`: `{"path": "media/….png", "width": …, "height": …}`.

    A value that does not fit its kind is recorded as its `repr`, of kind `text`, and the field
    `was` names the kind it should have had.

    Attributes:
        path: The folder.
        id: The run's id, which is the folder's name at first.
        manifest: What manifest.json says.
        journal: Where metrics go; None when the run is closed, or open for reading.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], *, writes: bool) -> None:
        self.path = path
        self.id: str = manifest["run_id"]
        self.manifest = manifest
        self.journal: Journal | None = None
        self._events: JsonlFile | None = None
        self._manifest_failed = False
        self._lost_before = int(manifest.get("lost_records") or 0)
        if writes:
            self.journal = Journal(JsonlFile(path / "metrics.jsonl"))
            self._events = JsonlFile(path / "events.jsonl")
            # A program that ends without closing its run loses no records.
            weakref.finalize(self, _leave, os.getpid(), self.journal, self._events)

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str],
        *,
        config: Mapping[str, Any],
        seed: Any,
        hooks: Sequence[Any],
        device: Any = None,
    ) -> Run:
        """Start a run in a new folder, `<root>/<run_id>/`.

        Args:
            root: The folder of all runs; made when it is not there.
            config: The resolved configuration. What is not JSON stands there as its `repr`.
            seed: The seed.
            hooks: What to say about each hook, in order.
            device: Where the model is trained.

        Raises:
            RunError: The folder cannot be written.
        """
        root = Path(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = _new_folder(root)
            try:
                facts = Facts(config=config, seed=seed, hooks=hooks, device=device)
                manifest = new_manifest(path.name, facts)
                write_manifest(path, manifest)
                return cls(path, manifest, writes=True)
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
        except OSError as error:
            raise RunError(
                f"No run can be recorded in {root}: {error}. Give a folder that can be written, "
                "with space left on its disk."
            ) from error

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        resume: bool = False,
        config: Mapping[str, Any] | None = None,
        seed: Any = None,
        hooks: Sequence[Any] | None = None,
        device: Any = None,
    ) -> Run:
        """Open a run that exists.

        Args:
            path: The run's folder.
            resume: Continue it, under the same id: its status is `training` again, and
                `manifest["parts"]` gets a new part. Without it, nothing is written.
            config: The configuration it goes on with; None: it is still the same.
            seed: The seed.
            hooks: What to say about each hook; None: they are still the same.
            device: Where the model is trained.

        Raises:
            RunError: It is no run, or cannot be written when it is to be continued.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if not resume:
            return cls(path, manifest, writes=False)
        _warn_of_another_writer(path, manifest)
        facts = Facts(config=config, seed=seed, hooks=hooks, device=device)
        try:
            remove_leftovers(path)
            manifest = continued(path, manifest, facts)
            write_manifest(path, manifest)
            return cls(path, manifest, writes=True)
        except OSError as error:
            raise RunError(f"The run {path} cannot be continued: {error}.") from error

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints; it is made by the first."""
        return self.path / "checkpoints"

    def log(
        self, step: int, epoch: int | None, name: str, value: Any, kind: Kind = "scalar"
    ) -> None:
        """Record one value.

        A scalar may be a number that is still on the device, a `LazyFloat` or a tensor of one
        element: it is read when the buffer is written. The others are made ready at once.
        """
        journal = self.journal
        if journal is None:
            raise RunError(_READ_ONLY.format(self.path))
        if kind != "scalar":
            value, kind = self._prepare(step, name, value, kind)
        elif type(value) is not float and type(value) is not LazyFloat:
            value = _held(value)
        journal.add((step, epoch, time.time(), name, kind, value))

    def log_metrics(self, step: int, epoch: int | None, metrics: Mapping[str, Any]) -> None:
        """Record several scalars of one moment, without reading them."""
        if self.journal is None:
            raise RunError(_READ_ONLY.format(self.path))
        add, when = self.journal.add, time.time()
        # The items() of a lazy dict would read them.
        items = dict.items(metrics) if isinstance(metrics, LazyDict) else metrics.items()
        for name, value in items:
            if type(value) is not float and type(value) is not LazyFloat:
                value = _held(value)
            add((step, epoch, when, name, "scalar", value))

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record that something happened, in events.jsonl, at once.

        Fields called `v`, `time` or `kind` get an underscore, as these are the record's own.
        """
        if self._events is None:
            raise RunError(_READ_ONLY.format(self.path))
        record: dict[str, Any] = {"v": VERSION, "time": time.time(), "kind": plain(kind)}
        for name, value in fields.items():
            record[name + "_" if name in _RESERVED else name] = plain(value)
        self._events.append([line(record)])

    def update(self, **fields: Any) -> None:
        """Change fields of the manifest, and write it atomically."""
        if self.journal is None:
            raise RunError(_READ_ONLY.format(self.path))
        self.manifest.update((name, plain(value)) for name, value in fields.items())
        self.manifest["lost_records"] = self._lost_before + self.lost
        try:
            write_manifest(self.path, self.manifest)
        except OSError as error:
            if not self._manifest_failed:
                log.warning("Cannot write %s: %s. Training goes on.", self.path, error)
            self._manifest_failed = True

    @property
    def lost(self) -> int:
        """How many records this process could not write."""
        if self.journal is None or self._events is None:
            return 0
        return self.journal.file.lost + self._events.lost

    def flush(self, *, durable: bool = False) -> None:
        """Write what is waiting; numbers on a device are read now.

        Args:
            durable: also wait until the disk has it.
        """
        if self.journal is not None:
            self.journal.flush()
            if durable:
                self.journal.file.sync()

    def close(self, status: str = "completed", error: BaseException | str | None = None) -> None:
        """End the run: everything is written, and the manifest says when and how it ended.

        Args:
            status: `completed`, `stopped`, `interrupted`, `preempted` or `error`.
            error: What went wrong, for the manifest's `last_error`.
        """
        if self.journal is None or self._events is None:
            return
        self.flush()
        ended = now()
        parts: list[dict[str, Any]] = [dict(part) for part in self.manifest["parts"]]
        parts[-1].update(ended=ended, status=status)
        text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        self.update(status=status, ended=ended, last_error=text, parts=parts)
        self.journal.file.close()
        self._events.close()
        self.journal = self._events = None

    def _prepare(self, step: int, name: str, value: Any, kind: Kind) -> tuple[Any, Kind]:
        """Return a value of another kind than scalar as JSON, and its kind."""
        if kind not in _KINDS:
            raise RunError(f"Unknown kind '{kind}'. There are {listed(_KINDS)}.")
        try:
            if kind == "text":
                return str(value), kind
            if kind == "histogram":
                return histogram(value), kind
            return save_image(value, self.path / "media", step, name), kind
        except Exception as error:  # nothing that is logged stops training
            log.warning("'%s' at step %s is no %s: %s", name, step, kind, error)
            return InvalidValue(shown(value), kind), kind


_READ_ONLY = "The run {} is closed, or was opened for reading: Run.open(path, resume=True) writes."


def _leave(pid: int, journal: Journal, events: JsonlFile) -> None:
    """Write what is waiting when nobody has a run any more, or the program ends."""
    if os.getpid() == pid:  # a fork has a copy of the buffer, which is not its own to write
        journal.flush()
        journal.file.close()
        events.close()


def _warn_of_another_writer(path: Path, manifest: Mapping[str, Any]) -> None:
    part = (manifest.get("parts") or [{}])[-1]
    if manifest.get("status") == "training" and part.get("pid") != os.getpid() and is_alive(part):
        log.warning(
            "The run %s is being written by process %s, which is still alive. Two trainings in one "
            "run mix their records: end one of them.",
            path,
            part["pid"],
        )


def _new_folder(root: Path) -> Path:
    while True:
        path = root / new_run_id()
        with suppress(FileExistsError):
            path.mkdir()
            return path


def _held(value: Any) -> Any:
    """Return what can wait in the buffer: a tensor would change under an in-place operation."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().clone()  # queued on its device, which nobody waits for
    if isinstance(value, numbers.Number):  # numpy's too; none of them changes
        return value
    found = number(value)  # an array of one element
    return InvalidValue(shown(value), "scalar") if found is None else found
