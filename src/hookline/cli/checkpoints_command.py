"""`hookline checkpoints`: list the checkpoints of a run, show, verify, prune and export them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hookline.arguments import user_path
from hookline.cli.command_base import (
    Json,
    RunsFolder,
    bad_value,
    check_runs_folder,
    new_group,
)
from hookline.cli.text_output import print_json, progress_bar, show, show_lines
from hookline.errors import CheckpointError, listed, nearest
from hookline.interrupts import HeldInterrupts
from hookline.text_tables import join_some

if TYPE_CHECKING:
    from hookline.runs.checkpoint_reader import SavedCheckpoint

_STYLES = {
    r"\A.*": "bold",
    r"(?<=  )(complete|ok)\b": "green",
    r"\b(damaged|emergency)\b": "red",
}

checkpoints_app = new_group("checkpoints")

RunWithCheckpoints = Annotated[
    str,
    typer.Argument(
        help="The id of a run, its beginning or end, the run's folder, a folder of checkpoints, "
        "or a checkpoint's folder.",
        metavar="RUN",
    ),
]
CheckpointName = Annotated[
    str | None,
    typer.Option(
        *("--checkpoint", "-c"),
        help="The checkpoint: its name, its step, last or best; by default the newest complete.",
        metavar="NAME",
    ),
]


@checkpoints_app.callback(invoke_without_command=True)
def checkpoints(context: typer.Context) -> None:
    """List the checkpoints of a run, show, verify, prune and export them.

    Example: **hookline checkpoints list 20261115-210655-3f9c7b**
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


# -- list -----------------------------------------------------------------------------------------


@checkpoints_app.command("list")
def list_checkpoints(
    run: RunWithCheckpoints, runs: RunsFolder = None, as_json: Json = False
) -> None:
    """List the checkpoints of a run, the oldest first.

    A checkpoint is complete if its manifest is valid and all files have their sizes;
    **hookline checkpoints verify** also compares the hashes. An **emergency** checkpoint was saved
    after a crash, and is never resumed from automatically. No run can be resumed from one that is
    **weights-only**.

    Example: **hookline checkpoints list 20261115-210655-3f9c7b**
    """
    from hookline.cli.checkpoint_tables import format_list

    folder = _find_folder(run, runs)
    complete, damage = folder.read()
    if as_json:
        found = [{"name": one.path.name, **asdict(one), "damage": None} for one in complete]
        print_json([*found, *({"name": name, "damage": text} for name, text in damage.items())])
    elif complete or damage:
        show(format_list(complete, damage), _STYLES)
    else:
        advice = "To save some, add the hook ModelCheckpoint."
        show_lines([f"{folder.path} contains no checkpoints. {advice}"])


# -- show -----------------------------------------------------------------------------------------


@checkpoints_app.command("show")
def show_checkpoint(
    run: RunWithCheckpoints,
    checkpoint: CheckpointName = None,
    runs: RunsFolder = None,
    as_json: Json = False,
) -> None:
    """Show one checkpoint: its weights with shapes and dtypes, its state, files and hashes.

    Example: **hookline checkpoints show 20261115-210655-3f9c7b --checkpoint best**

    By its folder: **hookline checkpoints show runs/20261115-210655-3f9c7b/checkpoints/step_000120**
    """
    from hookline.checkpoint.contents import read_contents
    from hookline.cli.checkpoint_tables import format_contents

    path = _find_folder(run, runs).choose(checkpoint)
    contents = read_contents(path)
    if as_json:
        print_json({"path": str(path), **asdict(contents)})
    else:
        show(format_contents(path, contents))


# -- verify ---------------------------------------------------------------------------------------


@checkpoints_app.command("verify")
def verify_checkpoints(
    run: RunWithCheckpoints,
    checkpoint: CheckpointName = None,
    runs: RunsFolder = None,
    as_json: Json = False,
) -> None:
    """Read all files of all checkpoints of a run, and compare sizes and hashes.

    The exit code is 1 if a checkpoint is damaged; the file is named.

    Example: **hookline checkpoints verify 20261115-210655-3f9c7b**
    """
    from hookline.checkpoint.catalog import scan_checkpoints
    from hookline.text_tables import format_table

    folder = _find_folder(run, runs)
    one = folder.choose(checkpoint) if checkpoint is not None else folder.named
    scan = scan_checkpoints(folder.path)
    paths = [one] if one is not None else [*scan.complete, *map(folder.path.joinpath, scan.damage)]
    if not paths:
        raise CheckpointError(f"{folder.path} contains no checkpoints.")
    problems = {path.name: problem for path, problem in _verify_all(paths).items()}
    damaged = [name for name, problem in problems.items() if problem is not None]
    if as_json:
        print_json([{"name": name, "damage": problem} for name, problem in problems.items()])
    else:
        rows = [(name, problem or "ok") for name, problem in problems.items()]
        count = f"{len(paths)} checkpoint{'' if len(paths) == 1 else 's'}"
        show(format_table(("checkpoint", "files"), rows), _STYLES)
        show(f"\n{count} verified, {len(damaged)} damaged.", {})
    if damaged:
        raise typer.Exit(1)


def _verify_all(paths: Sequence[Path]) -> dict[Path, str | None]:
    """Return what is damaged in each checkpoint, while a bar in the terminal shows the progress."""
    from hookline.checkpoint.catalog import verify_checkpoint

    problems: dict[Path, str | None] = {}
    with progress_bar() as update:
        for i, path in enumerate(paths):
            update(f"Verifying {path.name}", i, len(paths))
            problems[path] = verify_checkpoint(path)
    return problems


# -- prune ----------------------------------------------------------------------------------------


@checkpoints_app.command()
def prune(
    run: RunWithCheckpoints,
    keep_last: Annotated[int, typer.Option(help="Keep the newest N.", min=0, metavar="N")] = 0,
    keep_best: Annotated[
        int,
        typer.Option(help="Keep the K best by --metric.", min=0, metavar="K"),
    ] = 0,
    metric: Annotated[
        str | None, typer.Option(help="The metric, such as val/loss.", metavar="NAME")
    ] = None,
    mode: Annotated[
        Literal["min", "max"],
        typer.Option(help="Whether low or high values are better."),
    ] = "min",
    keep_every: Annotated[
        int | None,
        typer.Option(
            help="Of every M steps, keep the first checkpoint.",
            min=1,
            metavar="M",
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
        raise bad_value("--keep-best", "--keep-best and --metric belong together.")
    folder = _find_folder(run, runs)
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
    from hookline.runs.location import find_run_of_checkpoint
    from hookline.runs.reader import OpenedRun

    run = find_run_of_checkpoint(folder.resolve() / "any")
    opened = None if run is None else OpenedRun(run)
    if opened is None or opened.status != "training":
        return
    raise CheckpointError(
        f"The run {opened.id} is still training. Nothing was removed. Wait until it ends; if its "
        "machine is gone, resume the run first."
    )


def _check_newest(complete: Sequence[SavedCheckpoint]) -> None:
    """Raise if the newest checkpoint, which remains, is damaged: an older one may be needed."""
    regular = [one for one in complete if not one.is_emergency]
    full = [one for one in regular if not one.is_weights_only]
    newest = (full or regular)[-1].path  # the one that a run would resume from
    problem = _verify_all([newest])[newest]
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


# -- export ---------------------------------------------------------------------------------------


@checkpoints_app.command()
def export(
    run: RunWithCheckpoints,
    checkpoint: CheckpointName = None,
    out: Annotated[
        Path | None,
        typer.Option(
            *("--out", "-o"),
            help="The file to write, or an existing folder; by default the checkpoint's name with "
            ".safetensors.",
            metavar="FILE",
            parser=user_path,
        ),
    ] = None,
    averaged: Annotated[
        bool, typer.Option("--ema", help="Export the average that the hook EMA has kept.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    runs: RunsFolder = None,
    as_json: Json = False,
) -> None:
    """Write the weights of a checkpoint to one safetensors file.

    It is loaded by **safetensors.torch.load_file** and by transformers: write it as
    model.safetensors into a folder with the model's config.json. Tied weights are in it once, as
    transformers expects; **safetensors.torch.load_model** loads it into any model.

    Example: **hookline checkpoints export 20261115-21 -c best -o model.safetensors**
    """
    path = _find_folder(run, runs).choose(checkpoint)
    file = out or Path(f"{path.name}.safetensors")
    if file.is_dir():
        file = file / "model.safetensors"
    if os.path.lexists(file) and not force:
        raise bad_value("--out", f"'{file}' exists; give another file, or --force to replace it.")
    with HeldInterrupts():
        from hookline.checkpoint.export import export_weights
        from hookline.cli.checkpoint_tables import format_size
    done = export_weights(path, file, averaged=averaged, replace=force)
    if as_json:
        print_json({"checkpoint": str(path), **asdict(done)})
        return
    lines = [
        f"checkpoint  {path}",
        f"file        {done.path}, {format_size(done.size)}, {done.tensors} tensors",
        *(f"tied        {name} is {other}" for name, other in done.tied.items()),
    ]
    if done.left_out:
        lines.append(f"left out    {join_some(done.left_out)}: not a tensor")
    show_lines(lines)


# -- which checkpoint -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _CheckpointFolder:
    """A folder of checkpoints, and the checkpoint in it that was given by its own folder."""

    path: Path
    named: Path | None = None

    def read(self) -> tuple[list[SavedCheckpoint], dict[str, str]]:
        """Return the complete checkpoints, and what is wrong with others, by name."""
        from hookline.checkpoint.catalog import scan_checkpoints
        from hookline.runs.checkpoint_reader import read_checkpoints

        return read_checkpoints(self.path)[0], scan_checkpoints(self.path).damage

    def choose(self, given: str | None) -> Path:
        """Return the checkpoint with a name or a step; by default the newest complete one."""
        from hookline.checkpoint.catalog import find_checkpoint, is_checkpoint
        from hookline.runs.checkpoint_reader import choose_of_step

        if given is None:
            return self.named or find_checkpoint(self.path, weights_suffice=True)
        if given in ("last", "best"):
            if (self.path / given).is_file():
                return find_checkpoint(self.path / given)
            raise CheckpointError(f"There is no '{given}' in {self.path}.")
        if given not in ("", ".", "..") and is_checkpoint(self.path / given):
            return self.path / given
        complete = self.read()[0]
        if (found := choose_of_step(complete, given)) is not None:
            return found
        names = [one.path.name for one in complete]
        raise CheckpointError(
            f"There is no checkpoint '{given}' in {self.path}.{nearest(given, names)} Give a "
            f"name or a step. Complete checkpoints: {listed(names)}."
        )


def _find_folder(run: str, runs: Path | None) -> _CheckpointFolder:
    """Return the folder of checkpoints that an argument gives.

    Args:
        run: The id of a run, or its beginning or end; or the folder of a run, of checkpoints, or
            of one checkpoint.
        runs: The folder of all runs; None for `runs`.
    """
    from hookline.checkpoint.catalog import is_checkpoint, scan_checkpoints
    from hookline.runs.location import find_run

    check_runs_folder(runs)
    path = user_path(run)
    if path.is_dir() and is_checkpoint(path):
        return _CheckpointFolder(path.parent, path)
    if path.is_dir() and any(scan_checkpoints(path)):
        return _CheckpointFolder(path)
    return _CheckpointFolder(find_run(run, runs or Path("runs")) / "checkpoints")
