"""MLflow: a SQLite file in the run's folder by default, or a server."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hookline.trackers.tracker import TrackedRun, TrackedValue

__all__ = ["MLflowTracker"]

_RUN_ID_TAG = "hookline.run_id"
_STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "error": "FAILED"}
_MAX_METRICS, _MAX_PARAMS, _MAX_TEXT = 1000, 100, 6000  # MLflow's limits


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

    def start(self, run: TrackedRun) -> Mapping[str, Any]:
        """Start a run of MLflow, or continue the one of an earlier part."""
        from mlflow.tracking import MlflowClient

        uri = self._find_uri(run)
        self._client = client = MlflowClient(tracking_uri=uri)
        experiment = self._find_experiment(run, uri)
        found = self._find_run(run, experiment)
        if found is None:
            tags = {_RUN_ID_TAG: run.id, "hookline.tags": ", ".join(run.tags)}
            found = client.create_run(experiment, run_name=run.name or run.id, tags=tags)
        else:
            client.update_run(found.info.run_id, status="RUNNING")
        self._run_id = found.info.run_id
        self._log_params(run.hyperparameters, found.data.params)
        client.log_dict(self._run_id, dict(run.manifest), "hookline/manifest.json")
        return {"run_id": self._run_id, "experiment_id": experiment, "tracking_uri": uri}

    def _find_uri(self, run: TrackedRun) -> str | None:
        mlflow: Any = import_module("mlflow")
        if self._uri is not None or mlflow.is_tracking_uri_set() or run.folder is None:
            return self._uri
        return f"sqlite:///{run.folder.absolute() / 'mlflow.db'}"

    def _find_experiment(self, run: TrackedRun, uri: str | None) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "hookline"
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        is_own = run.folder is not None and uri is not None and str(run.folder.absolute()) in uri
        artifacts = (run.folder.absolute() / "mlartifacts").as_uri() if is_own else None  # type: ignore[union-attr]
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def _find_run(self, run: TrackedRun, experiment: str) -> Any:
        """Return the run of an earlier part: by its id, or by its tag if that part crashed."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run.saved["run_id"])
        except (KeyError, MlflowException):
            query = f"tags.`{_RUN_ID_TAG}` = '{run.id}'"
            found = self._client.search_runs([experiment], query, max_results=1)
            return found[0] if found else None

    def _log_params(self, params: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Log parameters. MLflow refuses to change one, so those of an earlier part are kept."""
        from mlflow.entities import Param

        texts = {_plain_name(name): str(value)[:_MAX_TEXT] for name, value in params.items()}
        new = [Param(name, text) for name, text in texts.items() if name not in known]
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=new[start : start + _MAX_PARAMS])

    def log(self, values: Sequence[TrackedValue]) -> None:
        """Log scalars as metrics, images as images, and other kinds as artifacts."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_plain_name(v.name), float(v.value), int(v.time * 1000), v.step)
            for v in values
            if v.kind == "scalar"
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])
        for value in values:
            if value.kind != "scalar":
                self._log_other(value)

    def _log_other(self, value: TrackedValue) -> None:
        client, file = self._client, f"{_plain_name(value.name)}/step_{value.step:06d}"
        if value.kind == "text":
            client.log_text(self._run_id, value.value, f"text/{file}.txt")
        elif value.kind == "histogram":
            client.log_dict(self._run_id, dict(value.value), f"histograms/{file}.json")
        else:
            from PIL import Image

            with Image.open(value.value) as image:
                client.log_image(self._run_id, image, key=_plain_name(value.name), step=value.step)

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Log a checkpoint as artifacts, if that was chosen."""
        if self._checkpoints:
            self._client.log_artifacts(self._run_id, str(path), f"checkpoints/{path.name}")

    def finish(self, status: str) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id, _STATUS.get(status, "KILLED"))


def _plain_name(name: str) -> str:
    """Return a name with the characters that MLflow allows, as a relative path."""
    plain = re.sub(r"[^\w.\-/ ]", "_", name, flags=re.ASCII)
    parts = [part if part.strip(".") else "_" * len(part) for part in plain.split("/") if part]
    return "/".join(parts)[:250] or "_"
