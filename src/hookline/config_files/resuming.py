"""Resuming and forking: find the checkpoint that a training run starts from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hookline.checkpoint import find_checkpoint
from hookline.config_files.loading import Training
from hookline.errors import CheckpointError, listed
from hookline.runs.checkpoint_reader import read_checkpoints
from hookline.runs.environment import is_process_alive
from hookline.runs.jsonable import canonical_json
from hookline.runs.run_lookup import find_run, find_run_of_checkpoint, list_run_folders
from hookline.runs.run_reader import OpenedRun
from hookline.trainer.forking import describe_parent

__all__ = ["NEWEST", "describe_resume_command", "find_fork", "find_resume"]

NEWEST = "newest"
_UNFINISHED = ("interrupted", "preempted", "error", "lost", "training")


def find_resume(
    training: Training, given: str, fork_from: Path | None = None
) -> tuple[Path | None, str]:
    """Return the checkpoint to resume from, or None to start a new run, and a message about it.

    The hashes of the checkpoint's files are compared. If it is damaged, a warning names the file,
    and the newest undamaged checkpoint of the run is returned.

    Args:
        training: the training.
        given: the id of a run (or its beginning or end), the folder of a run or checkpoint, or
            "newest": the newest unfinished run of this configuration that has a checkpoint.
        fork_from: with "newest": only runs that were forked from this checkpoint.

    Raises:
        RunError: the run has failed twice in the same way after this checkpoint. A checkpoint that
            is given itself is not checked for that.
    """
    runs = training.trainer.config.runs
    if given != NEWEST:
        path = Path(given)
        path = path if path.exists() else find_run(given, runs or Path("runs"))
        checkpoint = find_checkpoint(path, verify=True)
        if checkpoint.resolve() != path.resolve():
            _check_crash_loop(checkpoint)
        return checkpoint, f"Resuming from {checkpoint}."
    if runs is None:
        return None, "There is nothing to resume, because `runs` is null. Starting a new run."
    parent = None if fork_from is None else describe_parent(fork_from)
    return _find_newest(_comparable(training.config), runs, parent)


def find_fork(training: Training, given: str) -> Path:
    """Return the checkpoint that a new run starts from.

    Args:
        training: the training.
        given: a run (its id, or the beginning or end of it, or its folder) for its newest
            checkpoint; a run and a step, as `RUN@120`; or a checkpoint's folder.

    Raises:
        CheckpointError: the run has no checkpoint of this step. The message lists its steps.
    """
    name, at, step = given.rpartition("@")
    if not at or not step.isdecimal() or Path(given).exists():
        name, step = given, ""
    path = Path(name)
    path = path if path.exists() else find_run(name, training.trainer.config.runs or Path("runs"))
    if not step:
        return find_checkpoint(path, verify=True)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    saved, _ = read_checkpoints(folder)
    matching = [one.path for one in saved if one.step == int(step)]
    if not matching:
        steps = sorted({one.step for one in saved if one.step is not None})
        known = f"It has {listed(map(str, steps))}." if steps else "It has no complete checkpoint."
        raise CheckpointError(f"The run {name} has no checkpoint of step {int(step)}. {known}")
    return find_checkpoint(matching[-1], verify=True)


def describe_resume_command(training: Training, overrides: Sequence[str]) -> str:
    """Return the command that continues a run that has ended too early; "" if there is no run."""
    run = training.trainer.run
    if run is None:
        return ""
    command = ["hookline", "train", training.source, *overrides]
    try:
        find_checkpoint(run.path)
    except CheckpointError:
        return f"It has no checkpoint yet. To start again: {shlex.join(command)}"
    return f"To resume: {shlex.join([*command, '--resume', run.id])}"


def _find_newest(
    configuration: str, runs: Path, parent: Mapping[str, Any] | None
) -> tuple[Path | None, str]:
    """Return the newest checkpoint; older runs are used only if newer ones have no checkpoint."""
    without_checkpoint = 0
    for folder in list_run_folders(runs):
        run = OpenedRun(folder)
        config = run.manifest.get("config")
        is_same = isinstance(config, dict) and _comparable(config) == configuration
        is_same &= parent is None or run.manifest.get("parent") == parent
        if not is_same or not _is_unfinished(run):
            continue
        try:
            checkpoint = find_checkpoint(folder, verify=True)
        except CheckpointError:
            without_checkpoint += 1
            continue
        _check_crash_loop(checkpoint)
        return checkpoint, f"Resuming the run {run.id} ({run.status}) from {checkpoint}."
    what = "this configuration" if parent is None else "this configuration and checkpoint"
    reason = f"there is no unfinished run of {what}"
    if without_checkpoint:
        plural = " has" if without_checkpoint == 1 else "s have"
        count = f"{without_checkpoint} unfinished run{plural}"
        reason = f"{count} {what}, but no checkpoint"
    return None, f"In {runs}, {reason}. Starting a new run."


def _check_crash_loop(checkpoint: Path) -> None:
    """Raise if the run has failed twice in the same way after this checkpoint."""
    folder = find_run_of_checkpoint(checkpoint)
    if folder is not None and find_spec("hookline.runs.crash_loop") is not None:
        import_module("hookline.runs.crash_loop").check_crash_loop(folder, checkpoint)


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
