"""Weights & Biases: the run's record, with our step as an axis of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hookline.trackers.protocol import RowTracker, TrackedRun, TrackedValue

STEP_AXIS = "hookline_step"
"""The axis of all values. W&B drops values below the highest of its own steps."""

_OWN_NAMES = (STEP_AXIS, "_step", "_timestamp", "_runtime", "_wandb")
# Of the manifest, in its config.
_LEFT_OUT = ("config", "packages", "training", "hooks", "attempts", "sources", "parameter_names")


class WandbTracker(RowTracker):
    """Writes a run of Weights & Biases, or into one that the program has started already.

    Args:
        checkpoints: log each checkpoint as an artifact.
        options: further arguments of `wandb.init`, such as `project`, `entity` and `mode`. What is
            not passed is as W&B is configured (`WANDB_PROJECT`, `WANDB_MODE` …).
    """

    is_awaited = True  # a hook may call wandb.log as soon as training begins

    def __init__(self, checkpoints: bool = False, **options: Any) -> None:
        super().__init__()
        self._checkpoints, self._options = checkpoints, options
        self._run: Any = None
        self.log_to_run: Any = None  # W&B's own
        self.is_own = False
        self._defined: set[str] = set()
        self._id = ""

    def start(self, run: TrackedRun) -> Mapping[str, Any]:
        """Start a run of W&B, continue the one of an earlier attempt, or use the active one."""
        import wandb

        active, other = wandb.run, _find_tracker(wandb.run)
        self.is_own = active is None or (other is not None and other.is_own)
        if self.is_own:  # also beside the run of another training in this process
            options = self._init_options(run)
            if active is not None:
                options["reinit"] = "create_new"
            self._run = wandb.init(**options)
        else:
            self._run = active
        self._defined, self._id = set(), run.id
        self._run.define_metric(STEP_AXIS, hidden=True)
        facts = {name: value for name, value in run.manifest.items() if name not in _LEFT_OUT}
        config = {**run.hyperparameters, "hookline": facts}
        self._run.config.update(config, allow_val_change=True)
        self._save_manifest(run)
        other = _find_tracker(self._run)
        self.log_to_run = self._run.log if other is None else other.log_to_run
        self._run.log = self._log_own
        if wandb.run is self._run:
            wandb.log = self._log_own
        ids = {name: getattr(self._run, name, None) for name in ("id", "project", "entity", "url")}
        return {name: value for name, value in ids.items() if value}

    def _init_options(self, run: TrackedRun) -> dict[str, Any]:
        saved = {name: run.saved[name] for name in ("id", "project", "entity") if name in run.saved}
        options: dict[str, Any] = {"id": run.id, "resume": "allow", "tags": list(run.tags) or None}
        options |= {"name": run.name or run.id, **saved}
        if run.folder is not None and "WANDB_DIR" not in os.environ:
            options["dir"] = str(run.folder)
        return options | self._options

    def _save_manifest(self, run: TrackedRun) -> None:
        file = Path(self._run.dir, "hookline_manifest.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(run.manifest, indent=1, ensure_ascii=False), encoding="utf-8")
        self._run.save(str(file), base_path=self._run.dir, policy="now")

    def _log_own(
        self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        """Log what the user's own `wandb.log` is called with.

        A `step` is a value of our axis: W&B would drop what is below the highest of its steps,
        which counts the rows of both.
        """
        if step is None:
            self.log_to_run(data, commit=commit)
        else:
            self._define(data)
            self.log_to_run({**data, STEP_AXIS: step})

    def _define(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._defined:
                self._defined.add(name)
                if "*" not in name:  # which would stand for many names
                    self._run.define_metric(name, step_metric=STEP_AXIS, step_sync=False)

    def _convert(self, value: TrackedValue) -> tuple[str, Any]:
        import wandb

        name, converted = value.name, value.value
        if name in _OWN_NAMES:
            name += "_"
        if value.kind == "histogram":
            import numpy as np

            counts, edges = converted["counts"], converted["edges"]
            converted = wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))
        elif value.kind == "image":
            converted = wandb.Image(str(converted))
        self._define([name])
        return name, converted

    def _log_row(self, row: Mapping[str, Any], step: int, seconds: float) -> None:
        self.log_to_run({STEP_AXIS: step, **row, "_timestamp": seconds})

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Log a checkpoint as an artifact, if that was chosen."""
        if not self._checkpoints:
            return
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._id}", type="model", metadata={"step": step})
        artifact.add_dir(str(path))
        self._run.log_artifact(artifact, aliases=["latest", path.name])

    def finish(self, status: str) -> None:
        """End the run, unless the program has started it."""
        wandb: Any = import_module("wandb")
        run = self._run
        if _find_tracker(run) is self:
            del run.log  # the class has it
            if self.log_to_run != run.log:
                run.log = self.log_to_run  # that of a disabled run
        if wandb.run is run:
            wandb.log = run.log
        if self.is_own:
            self._run.finish(exit_code=0 if status in ("completed", "stopped") else 1)


def _find_tracker(run: Any) -> WandbTracker | None:
    """Return the tracker that writes a run, if one does."""
    tracker = getattr(getattr(run, "log", None), "__self__", None)
    return tracker if isinstance(tracker, WandbTracker) else None
