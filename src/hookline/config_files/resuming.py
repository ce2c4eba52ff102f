"""Which run a training goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint import find_checkpoint
from hookline.config_files.loading import Training
from hookline.errors import CheckpointError
from hookline.runs.environment import is_process_alive
from hookline.runs.recorded_config import canonical_json
from hookline.runs.run_lookup import find_run, list_run_folders
from hookline.runs.run_reader import OpenedRun

__all__ = ["NEWEST", "find_resume"]

NEWEST = "newest"
_UNFINISHED = ("interrupted", "preempted", "error", "lost", "training")


def find_resume(training: Training, given: str) -> tuple[Path | None, str]:
    """Return the checkpoint to resume from, or None to start afresh, and a sentence about it.

    Args:
        training: the training.
        given: a run's id (or its beginning or end), its folder, or a checkpoint's; or "newest": the
            newest run of this configuration that has not finished and has a checkpoint.
    """
    runs = training.trainer.config.runs
    if given != NEWEST:
        path = Path(given)
        path = path if path.exists() else find_run(given, runs or Path("runs"))
        checkpoint = find_checkpoint(path)
        return checkpoint, f"Resuming from {checkpoint}."
    if runs is None:
        return None, "There is nothing to resume, because `runs` is null: starting afresh."
    return _newest(_meaning(training.config), runs)


def _newest(meaning: str, runs: Path) -> tuple[Path | None, str]:
    """The newest run counts; an older one is taken only where those after it have no checkpoint."""
    without = 0
    for folder in list_run_folders(runs):
        run = OpenedRun(folder)
        config = run.manifest.get("config")
        if not isinstance(config, dict) or _meaning(config) != meaning or not _is_unfinished(run):
            continue
        try:
            checkpoint = find_checkpoint(folder)
        except CheckpointError:
            without += 1
            continue
        return checkpoint, f"Resuming the run {run.id} ({run.status}) from {checkpoint}."
    what = "there is no unfinished run of this configuration"
    if without:
        have = (
            "run of this configuration has" if without == 1 else "runs of this configuration have"
        )
        what = f"{without} unfinished {have} no checkpoint"
    return None, f"In {runs}, {what}: starting afresh."


def _meaning(config: Mapping[str, Any]) -> str:
    """A configuration without what changes nothing of the training: where and how it is shown."""
    trainer = config.get("trainer", config)  # a file has a section for it
    shown = {"runs", "progress"}
    kept = {name: one for name, one in trainer.items() if name not in shown}
    return canonical_json(kept if trainer is config else {**config, "trainer": kept})


def _is_unfinished(run: OpenedRun) -> bool:
    status = run.status
    if status == "training":
        parts = run.manifest.get("parts") or [{}]
        return is_process_alive(parts[-1]) is not True  # of another machine nobody knows
    if status == "stopped":  # a time limit is no end, it is how a job makes room for the next
        ends = run.events("end")
        return bool(ends) and "time limit" in str(ends[-1].get("reason"))
    return status in _UNFINISHED
