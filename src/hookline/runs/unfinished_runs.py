"""Finding the run that a restarted job continues: the newest unfinished one that is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.checkpoint_lookup import find_checkpoint
from hookline.errors import CheckpointError
from hookline.runs.crash_loop import check_crash_loop
from hookline.runs.environment import is_process_alive
from hookline.runs.jsonable import canonical_json
from hookline.runs.manifest import inspect_run_manifest
from hookline.runs.run_files import find_refused_entries
from hookline.runs.run_lookup import list_run_folders
from hookline.runs.run_reader import OpenedRun

__all__ = ["comparable_config", "find_unfinished_run"]

log = logging.getLogger("hookline")

_UNFINISHED = ("interrupted", "preempted", "error", "lost", "training")
_WITHOUT_EFFECT = ("runs", "progress", "checkpoints")


def find_unfinished_run(
    runs: Path, is_same: Callable[[Mapping[str, Any]], bool]
) -> tuple[Path | None, str]:
    """Return the checkpoint to resume from, or None to start a new run, and a message about it.

    It is the newest undamaged checkpoint of the newest unfinished run that has one. A run counts as
    finished if it completed, or was stopped for another reason than a time limit. A run whose
    manifest is damaged, or whose files are links, is skipped with a warning.

    Args:
        runs: The folder of all runs.
        is_same: Returns whether the run with this manifest trains the same.

    Raises:
        RunError: The run has failed twice in the same way after this checkpoint.
    """
    without_checkpoint = 0
    for folder in list_run_folders(runs):
        run = OpenedRun(folder)
        manifest, problems = inspect_run_manifest(folder)
        problems += find_refused_entries(folder)
        if problems:
            log.warning("The run %s is not resumed automatically: %s.", folder, problems[0])
            continue
        if not is_same(manifest) or not _is_unfinished(run):
            continue
        try:
            checkpoint = find_checkpoint(folder, verify=True)
        except CheckpointError:
            without_checkpoint += 1
            continue
        check_crash_loop(folder, checkpoint)
        return checkpoint, f"Resuming the run {run.id} ({run.status}) from {checkpoint}."
    reason = "there is no unfinished run of this configuration"
    if without_checkpoint:
        plural = " has" if without_checkpoint == 1 else "s have"
        count = f"{without_checkpoint} unfinished run{plural}"
        reason = f"{count} this configuration, but no checkpoint"
    return None, f"In {runs}, {reason}. Starting a new run."


def comparable_config(config: Mapping[str, Any]) -> str:
    """Return a configuration as text, without the fields that do not affect training."""
    trainer = config.get("trainer", config)  # a config file has a section for it
    if not isinstance(trainer, Mapping):
        return canonical_json(config)
    kept = {name: value for name, value in trainer.items() if name not in _WITHOUT_EFFECT}
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
