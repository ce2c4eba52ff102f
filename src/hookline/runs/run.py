"""Writing a run: its manifest, metrics and events.

`Run` writes a folder, `TrackerOnlyRun` has none, and `RemoteRun` is written by another process.
"""

from __future__ import annotations

import logging
import numbers
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast

import torch

from hookline.arguments import (
    check_instance,
    check_mapping,
    check_path,
    read_items,
    show_value,
)
from hookline.checkpoint.atomic_files import remove_leftovers
from hookline.checkpoint.catalog import read_pointers
from hookline.context import LazyDict, LazyFloat
from hookline.errors import RunError, listed
from hookline.masking import mask_secrets
from hookline.runs.jsonable import safe_repr, to_json_number, to_jsonable
from hookline.runs.jsonl_file import VERSION, InvalidValue, JsonlFile, MetricsLog, encode_line
from hookline.runs.jsonl_reader import read_jsonl_backwards
from hookline.runs.location import create_run_folder, find_refused_entries
from hookline.runs.lock import RunLock
from hookline.runs.manifest import (
    continue_manifest,
    describe_attempt,
    new_manifest,
    read_run_manifest,
    utc_now,
    write_run_manifest,
)
from hookline.runs.media import make_histogram, save_image
from hookline.runs.rewind import check_rewind, finish_rewind, plan_rewind

log = logging.getLogger("hookline")

Kind = Literal["scalar", "text", "histogram", "image"]
_KINDS = ("scalar", "text", "histogram", "image")
_RESERVED_FIELDS = ("v", "time", "kind")


class Run:
    """One training run and its folder.

    `Run.create` starts a run, `Run.open` reads one or, with `resume=True`, continues it. After
    that, a failure to write does not raise: it is logged once and counted in the manifest's
    `lost_records`, and training continues.

    A line of `metrics.jsonl`:
    `{"v": 1, "step": 3, "epoch": 0, "time": 1763240815.2, "name": "train/loss", "kind": "scalar",
    "value": 0.5}`. The values by kind:

    - `scalar`: a number. NaN and infinities are the strings "NaN", "Infinity", "-Infinity".
    - `text`: a string.
    - `histogram`: `{"counts": […], "edges": […]}`.
    - `image`: `{"path": "media/….png", "width": …, "height": …}`.

    A value that does not match its kind is written as its `repr`, with the kind `text`; the field
    `was` has the kind it was logged as.

    Attributes:
        path: The folder.
        id: The run's id, which is the folder's name at first.
        manifest: The contents of manifest.json.
        metrics_log: Where metrics are written; None if the run is closed, or open for reading.
    """

    has_folder = True

    def __init__(self, path: Path, manifest: dict[str, Any], lock: RunLock | None = None) -> None:
        self.path = path
        self.id: str = manifest["run_id"]
        self.manifest = manifest
        self.metrics_log: MetricsLog | None = None
        self._events: JsonlFile | None = None
        self._manifest_failed = False
        self._lost_before = int(manifest.get("lost_records") or 0)
        self._lock = lock
        if lock is not None:
            self.metrics_log = MetricsLog(JsonlFile(path / "metrics.jsonl", lock.check))
            self._events = JsonlFile(path / "events.jsonl", lock.check)
            # A program that ends without closing its run loses no metrics.
            files = (self.metrics_log, self._events, lock)
            self._cleanup = weakref.finalize(self, _close_files, os.getpid(), *files)

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str],
        *,
        config: Mapping[str, Any],
        seed: Any,
        hooks: Sequence[Any],
        parent: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Run:
        """Start a run in a new folder, `<root>/<run_id>/`.

        Args:
            root: The folder of all runs; created if it does not exist.
            config: The resolved configuration. Values that JSON lacks are written as their `repr`.
            seed: The seed.
            hooks: A description of each hook, in order.
            parent: Where the run was forked from: `run_id`, `checkpoint` and `step`.
            **fields: Further fields of the manifest: `device`, where the model is trained;
                `training`, what the run consists of; `config_hash`, if the hash covers more than
                the configuration; `name` and `tags`; `resumed_from`, the name of the checkpoint
                that this attempt begins from.
        """
        root = Path(check_path("Run.create(root)", root, "the folder for runs"))
        hooks = read_items("Run.create(hooks=…)", hooks, "a list of descriptions")
        root = root.absolute()  # the process may change its working folder
        try:
            path = create_run_folder(root)
            try:
                with _held_lock(path) as lock:
                    attempt = describe_attempt(config, seed, hooks, **fields)
                    manifest = new_manifest(path.name, attempt, parent)
                    write_run_manifest(path, manifest)
                    return cls(path, manifest, lock)
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
        except OSError as error:
            raise RunError(
                f"Cannot create a run in {root}: {error}. Check that the folder is writable and "
                "the disk is not full."
            ) from error

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        resume: bool = False,
        position: Mapping[str, int] | None = None,
        config: Mapping[str, Any] | None = None,
        seed: Any = None,
        hooks: Sequence[Any] | None = None,
        **fields: Any,
    ) -> Run:
        """Open an existing run.

        Args:
            path: The run's folder.
            resume: Continue it under the same id: its status is `training` again, and
                `manifest["attempts"]` gets a new one. Otherwise nothing is written.
            position: Where to continue, as for `rewind`; None: at the end of the metrics log.
            config: The configuration from now on; None if it is the same.
            seed: The seed, if a configuration or hooks are given.
            hooks: A description of each hook; None if they are the same.
            **fields: Further fields of the manifest, as for `create`.

        Raises:
            RunError: The manifest is not valid, another process writes the run, or a file in its
                folder is a link or not a regular file. Nothing was written.
        """
        path = Path(check_path("Run.open(path)", path, "the folder of a run"))
        manifest = read_run_manifest(path)
        if not resume:
            return cls(path, manifest)
        path = path.absolute()
        refused = find_refused_entries(path)
        if refused:
            raise RunError(
                f"The run {path} cannot be resumed: {'; '.join(refused)}. Nothing in a run's "
                "folder may lead out of it."
            )
        try:
            with _held_lock(path) as lock:
                for folder in (path, path / "checkpoints"):
                    remove_leftovers(folder)
                attempt = describe_attempt(config, seed, hooks, **fields)
                # Read again: another process may have written the run while this one waited.
                manifest = continue_manifest(path, read_run_manifest(path), attempt)
                if unfinished := _find_unfinished(manifest):
                    check_rewind(path, unfinished)  # before anything is written
                write_run_manifest(path, manifest)
                run = cls(path, manifest, lock)
                cast(JsonlFile, run._events).drop_incomplete_line()
                run._finish_rewind()
                if position is not None:
                    run.rewind(position)
                return run
        except OSError as error:
            raise RunError(f"The run {path} cannot be resumed: {error}.") from error

    @property
    def metrics_file(self) -> Path:
        """The metrics log."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints; the first checkpoint creates it."""
        return self.path / "checkpoints"

    def log(
        self, step: int, epoch: int | None, name: str, value: Any, kind: Kind = "scalar"
    ) -> None:
        """Log one value.

        A scalar may be a number that is still on the device, a `LazyFloat` or a tensor with one
        element: it is read when the buffer is written. Other kinds are converted at once.
        """
        metrics_log = self.metrics_log or self._writable_log()
        chosen: Any = kind  # arrays have a != of their own
        if type(chosen) is not str or chosen != "scalar":
            value, kind = self._convert(step, name, value, kind)
        elif type(value) is not float and type(value) is not LazyFloat:
            value = _freeze_scalar(value)
        metrics_log.add((step, epoch, time.time(), name, kind, value))

    def log_metrics(self, step: int, epoch: int | None, metrics: Mapping[str, Any]) -> None:
        """Log several scalars with one time, without reading them."""
        add, now = self._writable_log().add, time.time()
        # The items() of a lazy dict would read them.
        if isinstance(metrics, LazyDict):
            items = dict.items(metrics)
        else:
            items = check_mapping("log_metrics(…, metrics)", metrics).items()
        for name, value in items:
            if type(value) is not float and type(value) is not LazyFloat:
                value = _freeze_scalar(value)
            add((step, epoch, now, name, "scalar", value))

    def event(self, kind: str, /, **fields: Any) -> None:
        """Write an event to events.jsonl at once.

        Fields called `v`, `time` or `kind` get an underscore: every event has these fields.
        """
        self._writable_log()
        record: dict[str, Any] = {"v": VERSION, "time": time.time(), "kind": to_jsonable(kind)}
        for name, value in fields.items():
            record[name + "_" if name in _RESERVED_FIELDS else name] = to_jsonable(value)
        record = mask_secrets(record)
        cast(JsonlFile, self._events).append([encode_line(record)])

    def update(self, **fields: Any) -> None:
        """Change fields of the manifest, and write it atomically."""
        self._writable_log()
        written = {name: to_jsonable(value) for name, value in fields.items()}
        self.manifest.update(mask_secrets(written, by_name=False))
        self.manifest["lost_records"] = self._lost_before + self.lost
        if self.is_forked:
            return  # the manifest is written by another process
        try:
            write_run_manifest(self.path, self.manifest)
        except OSError as error:
            if not self._manifest_failed:
                log.warning("Cannot write %s: %s. Training continues.", self.path, error)
            self._manifest_failed = True

    def add_to_field(self, field: str, items: Mapping[str, Any]) -> None:
        """Add items to a field of the manifest, also after the run has ended.

        Nothing is written if another process writes the run by then.
        """
        if self.metrics_log is not None or not self.has_folder:
            self.update(**{field: {**self.manifest.get(field, {}), **items}})
            return
        try:
            lock = RunLock.acquire(self.path)
            try:
                manifest = read_run_manifest(self.path)
                added = mask_secrets(to_jsonable(dict(items)), by_name=False)
                manifest[field] = {**manifest.get(field, {}), **added}
                write_run_manifest(self.path, manifest)
            finally:
                lock.release()
        except (OSError, RunError) as error:
            log.warning("'%s' is not written to the manifest of %s: %s", field, self.path, error)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that writes the run: it writes nothing."""
        return self._lock is not None and not self._lock.is_own

    @property
    def lost(self) -> int:
        """How many metrics and events this process could not write."""
        if self.metrics_log is None or self._events is None:
            return 0
        return self.metrics_log.file.lost + self._events.lost

    @property
    def problem(self) -> str | None:
        """Why the record of this process is not complete, in one line; None if it is."""
        self.flush()
        with suppress(OSError):  # a network file system that fails
            if not self.path.is_dir():  # it is not created again
                return f"{self.path} was deleted or moved: {self.lost} records were lost"
        return f"{self.lost} records were lost" if self.lost else None

    def flush(self, *, durable: bool = False) -> None:
        """Write the buffered metrics; numbers on a device are read now. `durable`: to the disk."""
        if self.metrics_log is not None:
            self.metrics_log.flush()
            if self._events is not None:
                self._events.append([])  # what a full disk refused
            if durable:
                self.metrics_log.file.sync()

    def position(self) -> dict[str, int] | None:
        """Write the buffered metrics, and return where the metrics log stands.

        A checkpoint keeps it, so that `rewind` can bring the log back to it. The log has to be on
        the disk before the checkpoint is: the writer of the checkpoint syncs `metrics_file`. None
        if the file system cannot say, or refuses records: a resumed run then continues behind the
        records of its step.
        """
        self.flush()
        file = self._writable_log().file
        if file.is_waiting:
            return None
        try:
            size = file.size
        except OSError as error:
            log.warning("Cannot find the end of %s: %s.", self.metrics_file, error)
            return None
        return {"metrics": size, "rewinds": len(self.manifest.get("rewinds", ()))}

    def rewind(self, position: Mapping[str, int]) -> None:
        """Bring the metrics log back to a position: the run continues from a checkpoint.

        The records behind it are moved to `repeated.jsonl`. Events stay as they are.

        Args:
            position: What `position` returned; or `{"step": N}`, which is behind the records of
                that step.
        """
        metrics_log = self._writable_log()
        if self.is_forked:
            return
        metrics_log.flush()
        try:
            self._finish_rewind()
            rewinds = self.manifest.get("rewinds", [])
            rewind = plan_rewind(metrics_log.file, rewinds, position)
            if rewind is not None:
                self.manifest["rewinds"] = [*rewinds, rewind]
                write_run_manifest(self.path, self.manifest)
                self._finish_rewind()
        except OSError as error:
            raise RunError(f"The metrics of {self.path} cannot be rewound: {error}.") from error

    def _finish_rewind(self) -> None:
        """Carry out the newest rewind of the manifest, if that was not done."""
        if unfinished := _find_unfinished(self.manifest):
            finish_rewind(self._writable_log().file, unfinished)
            unfinished["finished"] = True
            write_run_manifest(self.path, self.manifest)

    def close(self, status: str = "completed", error: BaseException | str | None = None) -> None:
        """End the run: write everything, and set when and how it ended in the manifest.

        Args:
            status: `completed`, `stopped`, `interrupted`, `preempted` or `error`.
            error: The error for the manifest's `last_error`.
        """
        if self.metrics_log is None or self._events is None:
            return
        expected = "an exception, a message or None"
        check_instance("close(…, error)", error, BaseException | str | None, expected)
        self.flush()
        ended = utc_now()
        attempts = [dict(attempt) for attempt in self.manifest["attempts"]]
        attempts[-1].update(ended=ended, status=status, error=self._describe_error(error))
        text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        self.update(status=status, ended=ended, last_error=text, attempts=attempts)
        assert self._lock is not None
        _close_files(os.getpid(), self.metrics_log, self._events, self._lock)
        self._cleanup.detach()
        self.metrics_log = self._events = None

    def _describe_error(self, error: BaseException | str | None) -> dict[str, Any] | None:
        """Return an error with the last step and the newest checkpoint before it."""
        if error is None:
            return None
        kind = type(error).__name__ if isinstance(error, BaseException) else None
        steps = (r.get("step") for r in read_jsonl_backwards(self.path / "metrics.jsonl"))
        step = next((step for step in steps if type(step) is int), None)
        last = read_pointers(self.checkpoints).get("last")
        message = to_jsonable(str(error))
        return {"type": kind, "message": message, "step": step, "checkpoint": last}

    def _writable_log(self) -> MetricsLog:
        if self.metrics_log is None:
            raise RunError(
                f"The run {self.path} is closed, or was opened for reading. "
                "Run.open(path, resume=True) opens it for writing."
            )
        return self.metrics_log

    def _convert(self, step: int, name: str, value: Any, kind: Kind) -> tuple[Any, Kind]:
        """Return a text, histogram or image as JSON, and its kind."""
        if not isinstance(kind, str) or kind not in _KINDS:
            raise RunError(f"Unknown kind {show_value(kind)}. Kinds are {listed(_KINDS)}.")
        try:
            if kind == "text":
                return str(value), kind
            if kind == "histogram":
                return make_histogram(value), kind
            if self.is_forked:
                return InvalidValue("", kind), kind  # dropped, as all values are here
            return self._save_image(value, step, name), kind
        except Exception as error:  # logging never stops training
            log.warning("Cannot log '%s' as %s at step %s: %s", name, kind, step, error)
            return InvalidValue(safe_repr(value), kind), kind

    def _save_image(self, value: Any, step: int, name: str) -> dict[str, Any]:
        return save_image(value, self.path / "media", step, name)


class TrackerOnlyRun(Run):
    """A run without a folder: its record only goes to trackers."""

    has_folder = False

    def __init__(self, run_id: str, parent: Mapping[str, Any] | None, **fields: Any) -> None:
        super().__init__(Path(), new_manifest(run_id, describe_attempt(**fields), parent))
        self.metrics_log = MetricsLog(cast(JsonlFile, _NoFile()))
        self._images: Path | None = None

    def event(self, kind: str, /, **fields: Any) -> None:
        """Drop an event."""

    def update(self, **fields: Any) -> None:
        """Change fields of the manifest, in memory."""
        self.manifest.update(fields)

    def _save_image(self, value: Any, step: int, name: str) -> dict[str, Any]:
        if self._images is None:
            self._images = Path(tempfile.mkdtemp(prefix="hookline-"))
        saved = save_image(value, self._images / "media", step, name)
        return {**saved, "path": str(self._images / saved["path"])}

    def close(self, status: str = "completed", error: BaseException | str | None = None) -> None:
        """End the run, and remove the temporary folder."""
        self.flush()
        if self._images is not None:
            shutil.rmtree(self._images, ignore_errors=True)


class _NoFile:
    """Stands for the file of a metrics log that is not written."""

    lost = 0

    def append(self, lines: list[bytes]) -> None:
        """Drop lines."""


class RemoteRun:
    """The run of rank 0, in the other processes: it has an id and a folder, and records nothing.

    Attributes:
        id: the run's id.
        path: its folder.
        checkpoints: the folder of its checkpoints.
    """

    def __init__(self, run_id: str, path: Path) -> None:
        self.id, self.path, self.checkpoints = run_id, path, path / "checkpoints"

    def log(self, step: int, epoch: int | None, name: str, value: Any, kind: str = "") -> None:
        """Record nothing: rank 0 does."""

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record nothing: rank 0 does."""


@contextmanager
def _held_lock(path: Path) -> Generator[RunLock, None, None]:
    """Take the lock of a run, and release it only if the block fails."""
    lock = RunLock.acquire(path)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def _find_unfinished(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the newest rewind of a manifest, if it was not carried out."""
    rewinds = manifest.get("rewinds")
    return rewinds[-1] if rewinds and not rewinds[-1].get("finished") else None


def _close_files(pid: int, metrics_log: MetricsLog, events: JsonlFile, lock: RunLock) -> None:
    """Write the buffered metrics when a run is garbage collected, or the program ends."""
    if os.getpid() == pid:  # a forked process has a copy of the buffer, and must not write it
        metrics_log.flush()
        metrics_log.file.close()
        events.close()
        lock.release()


def _freeze_scalar(value: Any) -> Any:
    """Return a scalar that can be buffered: an in-place operation would change a tensor."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().clone()  # queued on the device, without waiting for it
    if isinstance(value, numbers.Number):  # numpy's too; numbers are immutable
        return value
    number = to_json_number(value)  # an array with one element
    return InvalidValue(safe_repr(value), "scalar") if number is None else number
