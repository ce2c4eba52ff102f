"""trackio: a local SQLite file in trackio's own folder, or a Space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.trackers.tracker import RowTracker, TrackedRun, TrackedValue

__all__ = ["TrackioTracker"]


class TrackioTracker(RowTracker):
    """Writes a run of trackio, which `trackio show` opens.

    Args:
        project: the name of the project.
        checkpoints: log each checkpoint as an artifact.
        options: further arguments of `trackio.init`, such as `space_id`.
    """

    unsaved_seconds = 2.0  # it writes twice a second

    def __init__(
        self, project: str = "hookline", checkpoints: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self._project, self._checkpoints, self._options = project, checkpoints, options
        self._run: Any = None
        self._id = ""
        self._problem: str | None = None  # what it could not write
        self.is_continued = True

    def start(self, run: TrackedRun) -> Mapping[str, Any]:
        """Start a run of trackio, or continue the one of an earlier part."""
        import trackio

        facts = {key: run.manifest.get(key) for key in ("run_id", "git", "versions", "command")}
        config = {name.lstrip("_") or "unnamed": v for name, v in run.hyperparameters.items()}
        options: dict[str, Any] = {"embed": False, "resume": "allow", "name": run.id}
        options |= {"auto_log_cpu": False, "auto_log_gpu": False, **self._options}
        options["project"] = run.saved.get("project", self._project)
        self._run = trackio.init(config={**config, "hookline": facts}, **options)
        self._report_warnings()
        self._id = run.id
        self.is_continued = run.saved.get("id", self._run.id) == self._run.id
        return {"id": self._run.id, "name": self._run.name, "project": options["project"]}

    def _report_warnings(self) -> None:
        """Note what trackio's own thread cannot write: it only warns of that."""
        warn: Any = getattr(self._run, "_warn_once", None)

        def note(key: str, message: str) -> None:
            self._problem = message
            warn(key, message)

        self._problem = None
        if warn is not None:
            self._run._warn_once = note

    def _raise_problem(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise OSError(problem)

    def log(self, values: Sequence[TrackedValue]) -> None:
        """Log one row for each step."""
        super().log(values)
        self._raise_problem()

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
        self._raise_problem()
