"""`hookline checkpoints`: list the checkpoints of a run, show, verify, prune and export them."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from hookline.cli.checkpoint_selection import CheckpointName, RunWithCheckpoints, find_folder
from hookline.cli.command_base import (
    Command,
    Json,
    RunsFolder,
    delay_interrupts,
    new_group,
    one_of,
    path,
)
from hookline.cli.prune_command import prune
from hookline.cli.text_output import print_json, show
from hookline.errors import CheckpointError
from hookline.printable import printable
from hookline.text_tables import join_some

__all__ = ["checkpoints_app"]

_STYLES = {
    r"\A.*": "bold",
    r"(?<=  )(complete|ok)\b": "green",
    r"\b(damaged|emergency)\b": "red",
}

checkpoints_app = new_group("checkpoints")


@checkpoints_app.callback(invoke_without_command=True)
def checkpoints(context: typer.Context) -> None:
    """List the checkpoints of a run, show, verify, prune and export them.

    Example: **hookline checkpoints list 20261115-210655-3f9c7b**
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


# -- list -----------------------------------------------------------------------------------------


@checkpoints_app.command("list", cls=Command)
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

    folder = find_folder(run, runs)
    complete, damage = folder.read()
    if as_json:
        found = [{"name": one.path.name, **asdict(one), "damage": None} for one in complete]
        print_json([*found, *({"name": name, "damage": text} for name, text in damage.items())])
    elif complete or damage:
        show(format_list(complete, damage), _STYLES)
    else:
        place = printable(folder.path, 1000)
        show(f"{place} contains no checkpoints. To save some, add the hook ModelCheckpoint.")


# -- show -----------------------------------------------------------------------------------------


@checkpoints_app.command("show", cls=Command)
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

    path = find_folder(run, runs).choose(checkpoint)
    contents = read_contents(path)
    if as_json:
        print_json({"path": str(path), **asdict(contents)})
    else:
        show(format_contents(path, contents))


# -- verify ---------------------------------------------------------------------------------------


@checkpoints_app.command("verify", cls=Command)
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
    from hookline.checkpoint.checkpoint_lookup import scan_checkpoints
    from hookline.cli.checkpoint_verification import verify_all
    from hookline.text_tables import format_table

    folder = find_folder(run, runs)
    one = folder.choose(checkpoint) if checkpoint is not None else folder.named
    scan = scan_checkpoints(folder.path)
    paths = [one] if one is not None else [*scan.complete, *map(folder.path.joinpath, scan.damage)]
    if not paths:
        raise CheckpointError(f"{folder.path} contains no checkpoints.")
    problems = {path.name: problem for path, problem in verify_all(paths).items()}
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


checkpoints_app.command(cls=Command)(prune)


# -- export ---------------------------------------------------------------------------------------


@checkpoints_app.command(cls=Command)
def export(
    run: RunWithCheckpoints,
    checkpoint: CheckpointName = None,
    out: Annotated[
        Path | None,
        typer.Option(
            *("--out", "-o"),
            help="The file to write, or an existing folder; by default the checkpoint's name with "
            ".safetensors or .pt.",
            metavar="FILE",
            parser=path,
        ),
    ] = None,
    file_format: Annotated[
        Literal["safetensors", "torch"],
        typer.Option("--format", help="The format of the file.", **one_of("safetensors", "torch")),
    ] = "safetensors",
    averaged: Annotated[
        bool, typer.Option("--ema", help="Export the average that the hook EMA has kept.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    runs: RunsFolder = None,
    as_json: Json = False,
) -> None:
    """Write the weights of a checkpoint to one file, with its SHA-256 beside it.

    A safetensors file is loaded by **safetensors.torch.load_file** and by transformers: write it as
    model.safetensors into a folder with the model's config.json. With **--format torch** it is
    loaded by **torch.load(file, weights_only=True)**. Tied weights are in a safetensors file once,
    as transformers expects; **safetensors.torch.load_model** loads it into any model.

    Example: **hookline checkpoints export 20261115-21 -c best -o model.safetensors**

    Check the file: **sha256sum -c model.safetensors.sha256**
    """
    path = find_folder(run, runs).choose(checkpoint)
    ending = "safetensors" if file_format == "safetensors" else "pt"
    file = out or Path(f"{path.name}.{ending}")
    if file.is_dir():
        file = file / f"model.{ending}"
    if os.path.lexists(file) and not force:
        raise typer.BadParameter(
            f"'{file}' exists; give another file, or --force to replace it.", param_hint="'--out'"
        )
    with delay_interrupts():
        from hookline.checkpoint.export import export_weights
        from hookline.cli.checkpoint_tables import format_size
    done = export_weights(path, file, file_format=file_format, averaged=averaged, replace=force)
    if as_json:
        print_json({"checkpoint": str(path), **asdict(done)})
        return
    target = printable(done.path, 1000)
    lines = [
        f"checkpoint  {printable(path, 1000)}",
        f"file        {target}, {format_size(done.size)}, {done.tensors} tensors",
        f"sha256      {done.sha256}",
    ]
    lines += [
        f"tied        {printable(name)} is {printable(other)}" for name, other in done.tied.items()
    ]
    if done.left_out:
        lines.append(f"left out    {join_some(done.left_out)}: not a tensor")
    show("\n".join(lines), {})
