"""Choosing checkpoints on the command line: a run or folder, and a checkpoint in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hookline.arguments import user_path
from hookline.cli.command_base import check_runs_folder
from hookline.errors import CheckpointError, listed, nearest

if TYPE_CHECKING:
    from hookline.runs.checkpoint_reader import SavedCheckpoint

__all__ = ["CheckpointFolder", "CheckpointName", "RunWithCheckpoints", "find_folder"]

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


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints, and the checkpoint in it that was given by its own folder."""

    path: Path
    named: Path | None = None

    def read(self) -> tuple[list[SavedCheckpoint], dict[str, str]]:
        """Return the complete checkpoints, and what is wrong with others, by name."""
        from hookline.checkpoint.checkpoint_lookup import scan_checkpoints
        from hookline.runs.checkpoint_reader import read_checkpoints

        return read_checkpoints(self.path)[0], scan_checkpoints(self.path).damage

    def choose(self, given: str | None) -> Path:
        """Return the checkpoint with a name or a step; by default the newest complete one."""
        from hookline.checkpoint.checkpoint_lookup import find_checkpoint, is_checkpoint

        if given is None:
            return self.named or find_checkpoint(self.path, weights_suffice=True)
        if given in ("last", "best"):
            if (self.path / given).is_file():
                return find_checkpoint(self.path / given)
            raise CheckpointError(f"There is no '{given}' in {self.path}.")
        if given not in ("", ".", "..") and is_checkpoint(self.path / given):
            return self.path / given
        complete = self.read()[0]
        found = [one for one in complete if str(one.step) == given]
        if found:  # the newest; others than those with all of the state only if there is none
            order = {one.path: (not one.is_emergency, not one.is_weights_only) for one in found}
            return max(reversed(order), key=lambda path: order[path])
        names = [one.path.name for one in complete]
        raise CheckpointError(
            f"There is no checkpoint '{given}' in {self.path}.{nearest(given, names)} Give a "
            f"name or a step. Complete checkpoints: {listed(names)}."
        )


def find_folder(run: str, runs: Path | None) -> CheckpointFolder:
    """Return the folder of checkpoints that an argument gives.

    Args:
        run: The id of a run, or its beginning or end; or the folder of a run, of checkpoints, or
            of one checkpoint.
        runs: The folder of all runs; None for `runs`.
    """
    from hookline.checkpoint.checkpoint_lookup import is_checkpoint, scan_checkpoints
    from hookline.runs.run_lookup import find_run

    check_runs_folder(runs)
    path = user_path(run)
    if path.is_dir() and is_checkpoint(path):
        return CheckpointFolder(path.parent, path)
    if path.is_dir() and any(scan_checkpoints(path)):
        return CheckpointFolder(path)
    return CheckpointFolder(find_run(run, runs or Path("runs")) / "checkpoints")
