"""`hookline checkpoints`: list the checkpoints of a run, verify and export them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from hookline.text_tables import format_table, join_some

if TYPE_CHECKING:
    from hookline.runs.checkpoint_reader import SavedCheckpoint

_MAX_ROWS = 2000
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
    """List the checkpoints of a run, verify and export them.

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
    folder = _find_folder(run, runs)
    complete, damage = folder.read()
    if as_json:
        found = [{"name": one.path.name, **asdict(one), "damage": None} for one in complete]
        print_json([*found, *({"name": name, "damage": text} for name, text in damage.items())])
    elif complete or damage:
        show(_as_table(complete, damage), _STYLES)
    else:
        advice = "To save some, add the hook ModelCheckpoint."
        show_lines([f"{folder.path} contains no checkpoints. {advice}"])


def _as_table(complete: Sequence[SavedCheckpoint], damage: Mapping[str, str]) -> str:
    """Return checkpoints as a table, damaged ones with what is wrong with them."""
    from rich.filesize import decimal

    from hookline.runs.formatting import format_number

    headers = ("checkpoint", "step", "epoch", "size", "age", "status", "", "metrics")
    rows = [
        (
            *(one.path.name, format_number(one.step), format_number(one.epoch)),
            *(decimal(one.size), _format_age(one.created), "complete", _format_labels(one)),
            join_some(f"{name} {format_number(value)}" for name, value in one.metrics.items()),
        )
        for one in complete
    ]
    rows += [(name, "", "", "", "", "damaged", "", problem) for name, problem in damage.items()]
    return format_table(headers, rows, limit=_MAX_ROWS)


def _format_age(created: str) -> str:
    from hookline.runs.formatting import format_duration

    try:
        age = datetime.now(UTC) - datetime.fromisoformat(created)
    except (ValueError, TypeError):
        return "?"
    return format_duration(max(0.0, age.total_seconds()))


def _format_labels(one: SavedCheckpoint) -> str:
    labels = {"last": one.is_last, "best": one.is_best, "emergency": one.is_emergency}
    labels["weights-only"] = one.is_weights_only
    return " ".join(label for label, applies in labels.items() if applies)


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
    from rich.filesize import decimal

    path = _find_folder(run, runs).choose(checkpoint)
    file = out or Path(f"{path.name}.safetensors")
    if file.is_dir():
        file = file / "model.safetensors"
    if os.path.lexists(file) and not force:
        raise bad_value("--out", f"'{file}' exists; give another file, or --force to replace it.")
    with HeldInterrupts():
        from hookline.checkpoint.export import export_weights

    done = export_weights(path, file, averaged=averaged, replace=force)
    if as_json:
        print_json({"checkpoint": str(path), **asdict(done)})
        return
    lines = [
        f"checkpoint  {path}",
        f"file        {done.path}, {decimal(done.size)}, {done.tensors} tensors",
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
