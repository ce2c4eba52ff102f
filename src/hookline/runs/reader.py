"""Reading a run: finished, still training, or damaged."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from html import escape
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from hookline.arguments import check_instance, listed_strings
from hookline.errors import RunError
from hookline.runs.checkpoint_reader import SavedCheckpoint, read_checkpoints
from hookline.runs.environment import is_process_alive
from hookline.runs.formatting import format_run, format_run_line
from hookline.runs.jsonl_reader import JsonlReader, find_metric_problem, read_jsonl_backwards
from hookline.runs.location import find_refused_entries, find_refused_folder, find_run
from hookline.runs.lock import is_locked
from hookline.runs.manifest import inspect_run_manifest, last_write_time, parse_time
from hookline.runs.metric_values import (
    COLUMNS,
    MetricSummary,
    Row,
    read_rows,
    summarize_metrics,
)
from hookline.runs.rewind import REPEATED


def open_run(path: str | os.PathLike[str], *, runs: str | os.PathLike[str] = "runs") -> OpenedRun:
    """Open a run for reading.

        run = hookline.open_run("runs/20261115-210655-3f9c7b")
        run.metrics("val/*")
        run.checkpoints()[-1].load_into(model)

    Args:
        path: The run's folder; or its id, or the beginning or end of its id.
        runs: The folder of all runs, where an id is looked up.

    Raises:
        RunError: No run matches, or several do. The message names the closest ids.
    """
    return OpenedRun(find_run(path, runs))


class OpenedRun:
    """A run that is read from its folder, `path`, at each access: it may still be training.

    `damage` describes what is damaged or missing; everything else can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def manifest(self) -> dict[str, Any]:
        """The valid fields of manifest.json; empty if it cannot be read."""
        return inspect_run_manifest(self.path)[0]

    @property
    def id(self) -> str:
        """The run's id; the folder's name if there is no manifest."""
        return str(self.manifest.get("run_id") or self.path.name)

    @property
    def status(self) -> str:
        """`training`, or how the run ended.

        `lost`: its process died without setting a status. On another machine this is known from
        the lock that it held.
        `unknown`: there is no manifest.
        """
        return _status(self.path, self.manifest)

    @property
    def damage(self) -> list[str]:
        """Damaged or missing files and lines, one line each. Reads all files."""
        return self.results_and_damage()[1]

    @property
    def seconds(self) -> float | None:
        """How long all attempts have trained together; None if unknown."""
        manifest = self.manifest
        status = _status(self.path, manifest)
        attempts = manifest.get("attempts") or []
        total = 0.0
        for attempt in attempts:
            started, ended = parse_time(attempt.get("started")), parse_time(attempt.get("ended"))
            if ended is None and attempt is attempts[-1]:
                ended = time.time() if status == "training" else last_write_time(self.path)
            if started is not None and ended is not None:
                total += max(0.0, ended - started)
        return total if attempts else None

    def metrics(self, *names: str, kind: str | None = None, repeated: bool = False) -> list[Row]:
        """Return the metrics: dicts with `step`, `epoch`, `time`, `name`, `kind` and `value`.

        Args:
            names: Only these metrics; `val/*` matches all that begin with `val/`. `eval/…` is
                another name for `val/…`.
            kind: Only this kind: `scalar`, `text`, `histogram` or `image`.
            repeated: Also include, before the others, the values of steps that were trained again
                because the run was resumed from an earlier checkpoint.
        """
        listed_strings("metrics(*names)", names)
        check_instance("metrics(kind=…)", kind, str | None, "a kind of value")
        files = [*([REPEATED] if repeated else []), "metrics.jsonl"]
        patterns = ["val/" + name[5:] if name.startswith("eval/") else name for name in names]
        readers = [JsonlReader(self.path / file, growing=True) for file in files]
        rows = chain.from_iterable(read_rows(reader, patterns) for reader in readers)
        return [row for row in rows if kind is None or row["kind"] == kind]

    def frame(self, *names: str, kind: str | None = None, repeated: bool = False) -> Any:
        """Return what `metrics` returns as a pandas frame."""
        try:
            pandas: Any = import_module("pandas")
        except ImportError as error:
            raise RunError(f"run.frame() needs pandas ({error}): pip install pandas") from error
        rows = self.metrics(*names, kind=kind, repeated=repeated)
        return pandas.DataFrame(rows, columns=None if any("was" in r for r in rows) else COLUMNS)

    def events(self, *kinds: str) -> list[Row]:
        """Return the events, all or those of some kinds: starts, checkpoints, toggles, the end."""
        listed_strings("events(*kinds)", kinds)
        records = JsonlReader(self.path / "events.jsonl", growing=True)
        events = [{name: v for name, v in record.items() if name != "v"} for record in records]
        return [event for event in events if not kinds or event.get("kind") in kinds]

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the complete checkpoints, oldest first."""
        return self._read_checkpoints()[0]

    def _read_checkpoints(self) -> tuple[list[SavedCheckpoint], list[str]]:
        folder = self.path / "checkpoints"
        refused = find_refused_folder(folder)
        return ([], [refused]) if refused is not None else read_checkpoints(folder)

    def results(self) -> dict[str, MetricSummary]:
        """Return the last and best value of each scalar metric, by name."""
        return self.results_and_damage()[0]

    def results_and_damage(self) -> tuple[dict[str, MetricSummary], list[str]]:
        """Return `results()` and `damage`, reading each file once."""
        growing = self.status == "training"
        metrics = JsonlReader(self.path / "metrics.jsonl", growing=growing)
        others = [JsonlReader(self.path / "events.jsonl", growing=growing)]
        if os.path.lexists(self.path / REPEATED):
            others.append(JsonlReader(self.path / REPEATED, growing=growing))
        results = summarize_metrics(metrics)
        for reader in others:
            for _ in reader:
                pass  # its damage is known when everything has been read
        return results, self.collect_damage([metrics, *others])

    def collect_damage(self, readers: Iterable[JsonlReader]) -> list[str]:
        """Return what is damaged in files that were read, the manifest and the checkpoints."""
        damage = inspect_run_manifest(self.path)[1]
        damage += [line for reader in readers for line in reader.damage]
        damage += self._read_checkpoints()[1]
        known = "\n".join(damage)
        return damage + [x for x in find_refused_entries(self.path) if x not in known]

    def overview(self) -> dict[str, Any]:
        """Return the main facts of the run. It reads only the ends of files: fast for long runs.

        `damage` has what is wrong with the manifest, and which files are not opened.
        """
        manifest, damage = inspect_run_manifest(self.path)
        refused = find_refused_entries(self.path)
        step, loss = self._read_latest()
        return {
            "id": str(manifest.get("run_id") or self.path.name),
            "path": str(self.path),
            "name": manifest.get("name"),
            "tags": manifest.get("tags") or [],
            "status": _status(self.path, manifest),
            "started": manifest.get("started"),
            "seconds": self.seconds,
            "attempts": len(manifest.get("attempts") or []),
            "steps": step,
            "loss": loss,
            "config_hash": manifest.get("config_hash"),
            "git": manifest.get("git") or {},
            "last_error": manifest.get("last_error"),
            "damage": damage + [x for x in refused if x.partition(" ")[0] != "manifest.json"],
        }

    def _read_latest(self) -> tuple[int | None, float | None]:
        step: int | None = None
        for record in read_jsonl_backwards(self.path / "metrics.jsonl"):
            if find_metric_problem(record) is not None:
                continue
            if step is None and type(record.get("step")) is int:
                step = record["step"]
            if record["name"] == "train/loss" and record["kind"] == "scalar":
                return step, float(record["value"])
        return step, None

    def __repr__(self) -> str:
        return format_run_line(self.overview())

    def __str__(self) -> str:
        results, damage = self.results_and_damage()
        return format_run(self.overview(), self.manifest, results, self.checkpoints(), damage)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _status(folder: Path, manifest: Mapping[str, Any]) -> str:
    status = str(manifest.get("status") or "unknown")
    attempts = manifest.get("attempts")
    if status == "training" and attempts:
        is_alive = is_process_alive(attempts[-1])
        if is_alive is False or (is_alive is None and not is_locked(folder)):
            return "lost"
    return status
