"""Resuming: find the checkpoint that a training run continues from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint import find_checkpoint
from hookline.config_files.loading import Training
from hookline.errors import CheckpointError
from hookline.runs.environment import is_process_alive
from hookline.runs.jsonable import canonical_json
from hookline.runs.run_lookup import find_run, list_run_folders
from hookline.runs.run_reader import OpenedRun

__all__ = ["NEWEST", "find_resume"]

NEWEST = "newest"
_UNFINISHED = ("interrupted", "preempted", "error", "lost", "training")


def find_resume(training: Training, given: str) -> tuple[Path | None, str]:
    """Return the checkpoint to resume from, or None to start a new run, and a message about it.

    Args:
        training: the training.
        given: the id of a run (or its beginning or end), the folder of a run or checkpoint, or
            "newest": the newest unfinished run of this configuration that has a checkpoint.
    """
    runs = training.trainer.config.runs
    if given != NEWEST:
        path = Path(given)
        path = path if path.exists() else find_run(given, runs or Path("runs"))
        checkpoint = find_checkpoint(path)
        return checkpoint, f"Resuming from {checkpoint}."
    if runs is None:
        return None, "There is nothing to resume, because `runs` is null. Starting a new run."
    return _find_newest(_comparable(training.config), runs)


def _find_newest(configuration: str, runs: Path) -> tuple[Path | None, str]:
    """Return the newest checkpoint; older runs are used only if newer ones have no checkpoint."""
    without_checkpoint = 0
    for folder in list_run_folders(runs):
        run = OpenedRun(folder)
        config = run.manifest.get("config")
        is_same = isinstance(config, dict) and _comparable(config) == configuration
        if not is_same or not _is_unfinished(run):
            continue
        try:
            checkpoint = find_checkpoint(folder)
        except CheckpointError:
            without_checkpoint += 1
            continue
        return checkpoint, f"Resuming the run {run.id} ({run.status}) from {checkpoint}."
    reason = "there is no unfinished run of this configuration"
    if without_checkpoint:
        plural = " has" if without_checkpoint == 1 else "s have"
        count = f"{without_checkpoint} unfinished run{plural}"
        reason = f"{count} this configuration, but no checkpoint"
    return None, f"In {runs}, {reason}. Starting a new run."


def _comparable(config: Mapping[str, Any]) -> str:
    """Return a configuration as text, without the fields that do not affect training."""
    trainer = config.get("trainer", config)  # a config file has a section for it
    kept = {name: value for name, value in trainer.items() if name not in ("runs", "progress")}
    return canonical_json(kept if trainer is config else {**config, "trainer": kept})


def _is_unfinished(run: OpenedRun) -> bool:
    status = run.status
    if status == "training":
        parts = run.manifest.get("parts") or [{}]
        return is_process_alive(parts[-1]) is not True  # None: the process ran on another machine
    if status == "stopped":  # by a time limit, so that the next job can continue
        ends = run.events("end")
        return bool(ends) and "time limit" in str(ends[-1].get("reason"))
    return status in _UNFINISHED
