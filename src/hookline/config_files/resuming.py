"""Resuming and forking: find the checkpoint that a training run starts from."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hookline.arguments import user_path
from hookline.checkpoint import find_checkpoint
from hookline.config_files.loading import Training
from hookline.errors import CheckpointError, listed
from hookline.loop.torchrun import describe_launch
from hookline.masking import mask_arguments
from hookline.runs.checkpoint_reader import choose_of_step, read_checkpoints
from hookline.runs.location import find_run
from hookline.runs.restart import find_unfinished_run
from hookline.trainer.continuation import describe_parent

NEWEST = "newest"


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
    """
    runs = training.trainer.config.runs
    if given != NEWEST:
        path = user_path(given)
        path = path if path.exists() else find_run(given, runs or Path("runs"))
        checkpoint = find_checkpoint(path, verify=True)
        return checkpoint, f"Resuming from {checkpoint}."
    if runs is None:
        return None, "There is nothing to resume, because `runs` is null. Starting a new run."
    parent = {} if fork_from is None else {"parent": describe_parent(fork_from)}
    return find_unfinished_run(runs, {"config": training.config, **parent})


def find_fork(training: Training, given: str) -> Path:
    """Return the checkpoint that a new run starts from.

    Args:
        training: the training.
        given: a run (its id, or the beginning or end of it, or its folder) for its newest
            checkpoint; a run and a step, as `RUN@120`; or a checkpoint's folder.
    """
    name, at, step = given.rpartition("@")
    if not at or not step.isdecimal() or user_path(given).exists():
        name, step = given, ""
    path = Path(name)
    path = path if path.exists() else find_run(name, training.trainer.config.runs or Path("runs"))
    if not step:
        return find_checkpoint(path, verify=True)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    saved, _ = read_checkpoints(folder)
    chosen = choose_of_step(saved, step.lstrip("0") or "0")
    if chosen is None:
        steps = sorted({one.step for one in saved if one.step is not None})
        known = f"It has {listed(map(str, steps))}." if steps else "It has no complete checkpoint."
        raise CheckpointError(f"The run {name} has no checkpoint of step {step}. {known}")
    return find_checkpoint(chosen, verify=True)


def describe_resume_command(training: Training, overrides: Sequence[str]) -> str:
    """Return the command that continues a run that has ended too early; "" if there is none."""
    run = training.trainer.run
    if run is None or training.trainer.status in ("completed", "stopped"):
        return ""
    trust = [part for name in training.trust for part in ("--trust", name)]
    train = ["train", training.source, *mask_arguments(overrides), *trust]
    command = [*describe_launch(), "hookline", *train]
    try:
        find_checkpoint(run.path)
    except CheckpointError:
        return f"It has no checkpoint yet. To start again: {shlex.join(command)}"
    return f"To resume: {shlex.join([*command, '--resume', run.id])}"
