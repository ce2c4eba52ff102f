"""trackio: a local SQLite file in trackio's own folder, or a Space."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.trackers.protocol import RowTracker, TrackedRun, TrackedValue


class TrackioTracker(RowTracker):
    """Writes a run of trackio, which `trackio show` opens.

    Args:
        project: the name of the project.
        checkpoints: log each checkpoint as an artifact.
        options: further arguments of `trackio.init`, such as `space_id`.
    """

    def __init__(
        self, project: str = "hookline", checkpoints: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self._project, self._checkpoints, self._options = project, checkpoints, options
        self._run: Any = None
        self._id = ""

    def start(self, run: TrackedRun) -> Mapping[str, Any]:
        """Start a run of trackio, or continue the one of an earlier attempt."""
        import trackio

        facts = {key: run.manifest.get(key) for key in ("run_id", "git", "versions", "command")}
        config = {name.lstrip("_") or "unnamed": v for name, v in run.hyperparameters.items()}
        options: dict[str, Any] = {"embed": False, "resume": "allow", "name": run.id}
        options |= {"auto_log_cpu": False, "auto_log_gpu": False, **self._options}
        options["project"] = run.saved.get("project", self._project)
        self._run = trackio.init(config={**config, "hookline": facts}, **options)
        self._id = run.id
        return {"id": self._run.id, "name": self._run.name, "project": options["project"]}

    def _convert(self, value: TrackedValue) -> tuple[str, Any]:
        import trackio

        converted = value.value
        if value.kind == "histogram":
            pair = (converted["counts"], converted["edges"])
            converted = trackio.Histogram(np_histogram=pair)
        elif value.kind == "text":
            converted = trackio.Markdown(converted)
        elif value.kind == "image":
            converted = trackio.Image(str(converted))
        return value.name, converted

    def _log_row(self, row: Mapping[str, Any], step: int, seconds: float) -> None:
        self._run.log(row, step=step)

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Log a checkpoint as an artifact, if that was chosen."""
        if self._checkpoints:
            self._run.log_artifact(
                str(path), name=f"checkpoint-{self._id}", type="model", aliases=[path.name]
            )

    def finish(self, status: str) -> None:
        """Write what is left, and end the run."""
        self._run.finish()
