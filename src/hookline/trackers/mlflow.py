"""MLflow: a SQLite file in the run's folder by default, or a server."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from hookline.trackers.protocol import TrackedRun, TrackedValue, log_each

_RUN_ID_TAG = "hookline.run_id"
_STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "error": "FAILED"}
_MAX_METRICS, _MAX_PARAMS, _MAX_TEXT = 1000, 100, 6000  # MLflow's limits
_MAX_NAME = 250
_REFUSED = re.compile(r"[^\w.\-/ ]" if os.name == "nt" else r"[^\w.\-/ :]")
_ARTIFACTS = "mlartifacts"


class MLflowTracker:
    """Writes a run of MLflow.

    Args:
        tracking_uri: where to; by default what MLflow is configured with (`MLFLOW_TRACKING_URI`,
            `mlflow.set_tracking_uri`), else `mlflow.db` in the run's folder.
        experiment: the name of the experiment; by default `MLFLOW_EXPERIMENT_NAME`, or "hookline".
        checkpoints: log each checkpoint as an artifact.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        checkpoints: bool = False,
    ) -> None:
        self._uri, self._experiment, self._checkpoints = tracking_uri, experiment, checkpoints
        self._client: Any = None
        self._run_id = ""
        self._names = _PlainNames()
        self._active: tuple[str, str] | None = None  # the program's own run, and where it is

    def prepare(self) -> None:
        """Find the run that the program has started itself: MLflow keeps one for each thread."""
        mlflow: Any = sys.modules.get("mlflow")  # without it there is none
        active = getattr(mlflow, "active_run", lambda: None)()
        found = None if active is None else (active.info.run_id, mlflow.get_tracking_uri())
        self._active = found

    def start(self, run: TrackedRun) -> Mapping[str, Any]:
        """Start a run of MLflow, continue the one of an earlier attempt, or use the active one."""
        from mlflow.tracking import MlflowClient

        uri = self._find_uri(run)
        self._client = client = MlflowClient(tracking_uri=uri)
        found = self._find_run(run, uri)
        self._run_id = run_id = found.info.run_id
        if self._active is None:
            client.update_run(run_id, status="RUNNING")
        else:
            client.set_tag(run_id, _RUN_ID_TAG, run.id)
        self._log_params(run.hyperparameters, found.data.params)
        client.log_dict(run_id, dict(run.manifest), "hookline/manifest.json")
        experiment = found.info.experiment_id
        return {"run_id": run_id, "experiment_id": experiment, "tracking_uri": uri}

    def _find_uri(self, run: TrackedRun) -> str | None:
        if self._active is not None:
            return self._active[1]
        mlflow: Any = import_module("mlflow")
        if self._uri is not None or mlflow.is_tracking_uri_set() or run.folder is None:
            return self._uri
        return _find_database(run.folder)

    def _find_experiment(self, run: TrackedRun, uri: str | None) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "hookline"
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        is_own = run.folder is not None and uri == _find_database(run.folder)
        artifacts = _find_artifacts(run.folder) if is_own and run.folder is not None else None
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def _find_run(self, run: TrackedRun, uri: str | None) -> Any:
        """Return the program's own run, that of an earlier attempt, or a new one."""
        if self._active is not None:
            return self._client.get_run(self._active[0])
        experiment = self._find_experiment(run, uri)
        found = self._find_earlier_run(run, experiment)
        if found is None:
            tags = {_RUN_ID_TAG: run.id, "hookline.tags": ", ".join(run.tags)}
            found = self._client.create_run(experiment, run_name=run.name or run.id, tags=tags)
        return found

    def _find_earlier_run(self, run: TrackedRun, experiment: str) -> Any:
        """Return the run of an earlier attempt: by its id, or by its tag if that crashed."""
        from mlflow.exceptions import MlflowException

        with suppress(KeyError, MlflowException):
            found = self._client.get_run(run.saved["run_id"])
            if found.info.lifecycle_stage == "active":  # not deleted
                return found
        query = f"tags.`{_RUN_ID_TAG}` = '{run.id}'"
        runs = self._client.search_runs([experiment], query, max_results=1)
        return runs[0] if runs else None

    def _log_params(self, params: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Log parameters. MLflow refuses to change one, so earlier ones are kept."""
        from mlflow.entities import Param

        plain = _PlainNames().convert
        texts = {plain(name): str(value)[:_MAX_TEXT] for name, value in params.items()}
        new = [Param(name, text) for name, text in texts.items() if name not in known]
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=new[start : start + _MAX_PARAMS])

    def log(self, values: Sequence[TrackedValue]) -> None:
        """Log scalars as metrics, images as images, and other kinds as artifacts."""
        from mlflow.entities import Metric

        metrics = [
            Metric(self._names.convert(v.name), v.value, int(v.time * 1000), v.step)
            for v in values
            if v.kind == "scalar"
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])
        log_each(self._log_other, [value for value in values if value.kind != "scalar"])

    def _log_other(self, value: TrackedValue) -> None:
        client, name = self._client, self._names.convert(value.name)
        file = f"{name}/step_{value.step:06d}"
        if value.kind == "text":
            client.log_text(self._run_id, value.value, f"text/{file}.txt")
        elif value.kind == "histogram":
            client.log_dict(self._run_id, dict(value.value), f"histograms/{file}.json")
        else:
            from PIL import Image

            with Image.open(value.value) as image:
                client.log_image(
                    self._run_id, image, key=self._names.convert(value.name), step=value.step
                )

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Log a checkpoint as artifacts, if that was chosen."""
        if self._checkpoints:
            self._client.log_artifacts(self._run_id, str(path), f"checkpoints/{path.name}")

    def finish(self, status: str) -> None:
        """End the run, unless the program has started it."""
        if self._active is None:
            self._client.set_terminated(self._run_id, _STATUS.get(status, "KILLED"))


def _find_database(folder: Path) -> str:
    """Return the tracking URI of the database in a run's folder."""
    return f"sqlite:///{folder.absolute() / 'mlflow.db'}"


def _find_artifacts(folder: Path) -> str:
    """Return where the artifacts of that database are."""
    return (folder.absolute() / _ARTIFACTS).as_uri()


class _PlainNames:
    """Names as MLflow allows them: relative paths of letters, digits and a few characters.

    Two names that would become the same stay different.
    """

    def __init__(self) -> None:
        self._originals: dict[str, str] = {}

    def convert(self, name: str) -> str:
        """Return a name that MLflow allows."""
        plain = _make_plain(name)
        if self._originals.setdefault(plain, name) != name:
            plain = f"{plain[: _MAX_NAME - 9]}_{zlib.crc32(name.encode()):08x}"
        return plain


def _make_plain(name: str) -> str:
    plain = _REFUSED.sub("_", name)
    parts = [part if part.strip(".") else "_" * len(part) for part in plain.split("/") if part]
    return "/".join(parts)[:_MAX_NAME].rstrip("/") or "_"
