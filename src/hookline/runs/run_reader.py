"""A run that is read: finished, still being written, or damaged."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, overload

from hookline.errors import RunError
from hookline.runs.checkpoint_reader import SavedCheckpoint, read_checkpoints
from hookline.runs.find_run import find_run
from hookline.runs.formatting import as_html, as_line, as_text
from hookline.runs.jsonl_reader import Records, from_the_end, read_file
from hookline.runs.manifest import read_manifest
from hookline.runs.metric_summary import Result, number_of, results_of
from hookline.runs.writer_process import is_alive

__all__ = ["OpenedRun", "open_run"]

_COLUMNS = ("step", "epoch", "time", "name", "kind", "value")

Row = dict[str, Any]


def open_run(path: str | os.PathLike[str], *, runs: str | os.PathLike[str] = "runs") -> OpenedRun:
    """Open a run to read it; nothing is written.

        run = hookline.open_run("runs/20261115-210655-3f9c7b")
        run.metrics("val/*")
        run.checkpoints()[-1].load_into(model)

    Args:
        path: the run's folder; or its id, or the beginning or the end of its id.
        runs: the folder in which an id is looked for.

    Raises:
        RunError: There is no such run, or several; the message names the nearest ids.
    """
    return OpenedRun(find_run(path, runs))


class OpenedRun:
    """One run as its folder tells it, each time it is asked: a run may still be training.

    What is damaged or missing is named in `damage`, and everything else is there.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    # -- what it is -------------------------------------------------------------------------------

    @property
    def manifest(self) -> dict[str, Any]:
        """What manifest.json says; empty when it cannot be read."""
        return self._manifest()[0]

    def _manifest(self) -> tuple[dict[str, Any], str | None]:
        try:
            return read_manifest(self.path), None
        except RunError as error:
            missing = not (self.path / "manifest.json").exists()
            return {}, "manifest.json is missing" if missing else str(error)

    @property
    def id(self) -> str:
        """The run's id; the folder's name where there is no manifest."""
        return str(self.manifest.get("run_id") or self.path.name)

    @property
    def status(self) -> str:
        """How it stands, or how it ended.

        `lost`: nothing says how it ended, and its process is gone (seen on the same host only).
        `unknown`: there is no manifest.
        """
        return _status(self.manifest)

    @property
    def damage(self) -> list[str]:
        """What is damaged or missing, a line each; empty when nothing is. Reads everything."""
        growing = self.status == "training"
        problem = self._manifest()[1]
        return [
            *([] if problem is None else [problem]),
            *self._read("metrics.jsonl", growing).damage,
            *self._read("events.jsonl", growing).damage,
            *read_checkpoints(self.path / "checkpoints")[1],
        ]

    @property
    def seconds(self) -> float | None:
        """How long it has trained, all parts together; None when nobody knows."""
        manifest = self.manifest
        status = _status(manifest)
        parts = _parts(manifest)
        total = 0.0
        for part in parts:
            began, ended = _timestamp(part.get("started")), _timestamp(part.get("ended"))
            if ended is None and part is parts[-1]:
                ended = time.time() if status == "training" else self._last_write()
            if began is not None and ended is not None:
                total += max(0.0, ended - began)
        return total if parts else None

    # -- what it has recorded ---------------------------------------------------------------------

    @overload
    def metrics(
        self, *names: str, kind: str | None = ..., repeated: bool = ..., frame: Literal[False]
    ) -> list[Row]: ...

    @overload
    def metrics(
        self, *names: str, kind: str | None = ..., repeated: bool = ..., frame: bool | None = ...
    ) -> Any: ...

    def metrics(
        self,
        *names: str,
        kind: str | None = None,
        repeated: bool = False,
        frame: bool | None = None,
    ) -> Any:
        """Return what was logged: a pandas frame where pandas is installed, else a list of dicts.

        Each row has `step`, `epoch`, `time`, `name`, `kind` and `value`.

        Args:
            names: only these; `val/*` takes all that begin so. `eval/…` is another name for
                `val/…`.
            kind: only `scalar`, `text`, `histogram` or `image`.
            repeated: also steps that were trained again after the run was resumed from before
                them; without it, only the last time counts.
            frame: True: a pandas frame, or an error without pandas; False: a list of dicts.
        """
        records = self._read("metrics.jsonl", growing=True).records
        patterns = ["val/" + name[5:] if name.startswith("eval/") else name for name in names]
        rows = [
            _row(record)
            for record in (records if repeated else self._final(records))
            if kind is None or record.get("kind") == kind
            if not patterns or any(fnmatchcase(str(record.get("name")), p) for p in patterns)
        ]
        return _framed(rows, frame)

    def events(self, *kinds: str) -> list[Row]:
        """Return what happened: starts, checkpoints, toggles, the end.

        Args:
            kinds: only these.
        """
        records = self._read("events.jsonl", growing=True).records
        events = [{name: v for name, v in record.items() if name != "v"} for record in records]
        return [event for event in events if not kinds or event.get("kind") in kinds]

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that are whole, oldest first."""
        return read_checkpoints(self.path / "checkpoints")[0]

    def results(self) -> dict[str, Result]:
        """Return the last and the best value of each scalar metric, by name."""
        return results_of(self.metrics(kind="scalar", frame=False))

    def overview(self) -> dict[str, Any]:
        """Return the run in a line of facts, from the ends of its files: quick for long runs."""
        manifest = self.manifest
        git = manifest.get("git")
        step, loss = self._latest()
        return {
            "id": str(manifest.get("run_id") or self.path.name),
            "path": str(self.path),
            "status": _status(manifest),
            "started": manifest.get("started"),
            "seconds": self.seconds,
            "parts": len(_parts(manifest)),
            "steps": step,
            "loss": loss,
            "config_hash": manifest.get("config_hash"),
            "git": git if isinstance(git, dict) else {},
            "last_error": manifest.get("last_error"),
        }

    def _latest(self) -> tuple[int | None, float | None]:
        step: int | None = None
        begun = self._begun()
        for record in from_the_end(self.path / "metrics.jsonl"):
            if _is_repeated(record, begun):
                continue
            if step is None and type(record.get("step")) is int:
                step = record["step"]
            if record.get("name") == "train/loss":
                return step, number_of(record.get("value"))
        return step, None

    def _read(self, name: str, growing: bool) -> Records:
        return read_file(self.path / name, growing=growing)

    def _final(self, records: list[Row]) -> Iterable[Row]:
        """The records without those of steps that were trained again later."""
        begun = self._begun()
        return [record for record in records if not _is_repeated(record, begun)]

    def _begun(self) -> list[tuple[float, int]]:
        """When a run that was resumed began and went on, each time after how many steps."""
        begun = [
            (event["time"], event["step"])
            for event in self.events("start", "resumed")
            if isinstance(event.get("time"), float) and type(event.get("step")) is int
        ]
        return begun if len(begun) > 1 else []

    def _last_write(self) -> float | None:
        files = [self.path / name for name in ("metrics.jsonl", "events.jsonl")]
        return max((file.stat().st_mtime for file in files if file.is_file()), default=None)

    # -- how it shows itself ----------------------------------------------------------------------

    def __repr__(self) -> str:
        return as_line(self.overview())

    def __str__(self) -> str:
        return as_text(self.overview(), self.manifest, self.results(), self._shown(), self.damage)

    def _repr_html_(self) -> str:
        return as_html(self.overview(), self.manifest, self.results(), self._shown(), self.damage)

    def _shown(self) -> Sequence[SavedCheckpoint]:
        return self.checkpoints()


def _status(manifest: Mapping[str, Any]) -> str:
    status = str(manifest.get("status") or "unknown")
    parts = _parts(manifest)
    if status == "training" and parts and is_alive(parts[-1]) is False:
        return "lost"
    return status


def _parts(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts: Any = manifest.get("parts")
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _row(record: Row) -> Row:
    row = {name: record.get(name) for name in _COLUMNS}
    if row["kind"] == "scalar" and isinstance(row["value"], str):
        row["value"] = number_of(row["value"])
    if "was" in record:
        row["was"] = record["was"]
    return row


def _is_repeated(record: Row, begun: list[tuple[float, int]]) -> bool:
    when, step = record.get("time"), record.get("step")
    if not isinstance(when, float) or type(step) is not int:
        return False
    return any(when < start and step > first for start, first in begun)


def _framed(rows: list[Row], frame: bool | None) -> Any:
    if frame is False or (frame is None and find_spec("pandas") is None):
        return rows
    try:
        pandas: Any = import_module("pandas")
    except ImportError as error:
        raise RunError(f"A frame needs pandas ({error}): pip install pandas") from error
    return pandas.DataFrame(rows, columns=None if any("was" in r for r in rows) else _COLUMNS)


def _timestamp(text: Any) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    stamp = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    return stamp if math.isfinite(stamp) else None
