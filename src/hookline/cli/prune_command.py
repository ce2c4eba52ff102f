"""`hookline checkpoints prune`: remove checkpoints that are no longer needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hookline.cli.checkpoint_selection import RunWithCheckpoints, find_folder
from hookline.cli.command_base import Json, RunsFolder, one_of, whole_number
from hookline.cli.text_output import print_json, show
from hookline.errors import CheckpointError, listed, nearest

if TYPE_CHECKING:
    from hookline.runs.checkpoint_reader import SavedCheckpoint

__all__ = ["prune"]


def prune(
    run: RunWithCheckpoints,
    keep_last: Annotated[
        int, typer.Option(help="Keep the newest N.", **whole_number(0, metavar="N"))
    ] = 0,
    keep_best: Annotated[
        int,
        typer.Option(help="Keep the K best by --metric.", **whole_number(0, metavar="K")),
    ] = 0,
    metric: Annotated[
        str | None, typer.Option(help="The metric, such as val/loss.", metavar="NAME")
    ] = None,
    mode: Annotated[
        Literal["min", "max"],
        typer.Option(help="Whether low or high values are better.", **one_of("min", "max")),
    ] = "min",
    keep_every: Annotated[
        int | None,
        typer.Option(
            help="Of every M steps, keep the first checkpoint.",
            **whole_number(1, metavar="M"),
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them.")] = False,
    runs: RunsFolder = None,
    as_json: Json = False,
) -> None:
    """Remove checkpoints that are no longer needed.

    Without **--yes** the command shows what it would remove. A checkpoint that any option keeps is
    kept. Always kept: the newest, those that **last** and **best** name or that a link beside them
    names, those that were saved after a crash, damaged ones, and folders with other files. The
    newest is verified first. The run must not be training.

    Example: **hookline checkpoints prune 20261115-21 --keep-last 2 --keep-every 1000 --yes**

    The three best: **hookline checkpoints prune 20261115-21 --keep-best 3 --metric val/loss**
    """
    from hookline.checkpoint.retention import KeepRules
    from hookline.cli.checkpoint_tables import format_pruning, format_size
    from hookline.runs.checkpoint_reader import choose_kept

    if not (keep_last or keep_best or keep_every):
        raise typer.BadParameter(
            "expected at least one rule about what is kept.",
            param_hint="'--keep-last', '--keep-best' or '--keep-every'",
        )
    if bool(keep_best) != bool(metric):
        raise typer.BadParameter(
            "--keep-best and --metric belong together.", param_hint="'--keep-best'"
        )
    folder = find_folder(run, runs)
    complete, damage = folder.read()
    links = {name: path for name in damage if (path := folder.path / name).is_symlink()}
    damage = {name: problem for name, problem in damage.items() if name not in links}
    linked = {path.resolve() for path in links.values()}
    if metric is not None and metric.startswith("eval/"):  # another name of val/…
        metric = f"val/{metric.removeprefix('eval/')}"
    known = {name for one in complete for name in one.metrics}
    if metric is not None and metric not in known:
        raise CheckpointError(
            f"No checkpoint in {folder.path} has the metric '{metric}'.{nearest(metric, known)} "
            f"Metrics of these checkpoints: {listed(sorted(known))}."
        )
    reasons = choose_kept(complete, KeepRules(keep_last, keep_best, mode, keep_every), metric)
    for one, why in zip(complete, reasons, strict=True):
        if one.path.resolve() in linked:
            why.append("link")
    unneeded = [one for one, kept in zip(complete, reasons, strict=True) if not kept]
    if yes and unneeded:
        _check_not_training(folder.path)
        _check_newest(complete)
        unneeded = _remove(unneeded)
    if as_json:
        kept = dict(zip((one.path.name for one in complete), reasons, strict=True))
        gone = [one.path.name for one in unneeded]
        print_json({"removed" if yes else "would_remove": gone, "kept": kept, "damaged": damage})
        return
    show(format_pruning(complete, reasons, damage))
    size = format_size(sum(one.size for one in unneeded))
    count = f"{len(unneeded)} of {len(complete)} checkpoints ({size})"
    if yes:
        show(f"\nRemoved {count}.", {})
    else:
        show(f"\nWould remove {count}." + " To remove them, add --yes." * bool(unneeded), {})


def _check_not_training(folder: Path) -> None:
    """Raise if a process may still be writing the run of these checkpoints."""
    from hookline.runs.run_lookup import find_run_of_checkpoint
    from hookline.runs.run_reader import OpenedRun

    run = find_run_of_checkpoint(folder.resolve() / "any")
    opened = None if run is None else OpenedRun(run)
    if opened is None or opened.status != "training":
        return
    part = (opened.manifest.get("parts") or [{}])[-1]
    raise CheckpointError(
        f"The run {opened.id} is still training: process {part.get('pid')} on {part.get('host')}. "
        "Nothing was removed. Wait until it ends; if that machine is gone, resume the run first."
    )


def _check_newest(complete: Sequence[SavedCheckpoint]) -> None:
    """Raise if the newest checkpoint, which remains, is damaged: an older one may be needed."""
    from hookline.cli.checkpoint_verification import verify_all

    regular = [one for one in complete if not one.is_emergency]
    full = [one for one in regular if not one.is_weights_only]
    newest = (full or regular)[-1].path  # the one that a run would resume from
    problem = verify_all([newest])[newest]
    if problem is not None:
        raise CheckpointError(
            f"{newest}{os.sep}{problem}. Nothing was removed, because the newest checkpoint is "
            "damaged. Move it away, and run the command again."
        )


def _remove(unneeded: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Remove checkpoints, and return those that were removed; raise if some were not."""
    from hookline.checkpoint.retention import remove_checkpoint

    removed = [one for one in unneeded if remove_checkpoint(one.path)]
    left = [one.path.name for one in unneeded if one not in removed]
    if left:
        raise CheckpointError(
            f"Removed {len(removed)} of {len(unneeded)} checkpoints. Not removed: {listed(left)}."
        )
    return removed
