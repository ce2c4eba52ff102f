"""Stopping a run that fails again and again after the same checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.errors import RunError
from hookline.printable import message_lines, printable
from hookline.runs.checkpoint_reader import read_checkpoints
from hookline.runs.manifest import read_run_manifest

__all__ = ["check_crash_loop"]

_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")  # addresses, process numbers, free memory


def check_crash_loop(run_folder: Path, checkpoint: Path) -> None:
    """Raise an error if the same failure has followed a checkpoint twice in a row.

    Failures are the same if the exceptions have the same class and message, apart from numbers and
    addresses, and came after the same step. Call it for checkpoints that were chosen automatically:
    somebody who names a checkpoint may have repaired the cause.

    Args:
        run_folder: The run's folder.
        checkpoint: The checkpoint that it would be resumed from.

    Raises:
        RunError: It names the failure, and the command that continues from an older checkpoint.
    """
    parts: Any = read_run_manifest(run_folder).get("parts")
    last_two = parts[-2:] if isinstance(parts, list) else []
    failures = [_describe_failure(part, checkpoint.name) for part in last_two]
    if len(failures) < 2 or failures[0] is None or failures[0] != failures[1]:
        return
    error = last_two[-1]["error"]
    failure = f"{error.get('type')}: {error.get('message')}"
    raise RunError(
        message_lines(
            f"The run {run_folder} failed twice in the same way after the checkpoint {checkpoint}, "
            f"in or after step {error.get('step')}: {printable(failure, 2000)}",
            *_describe_choices(checkpoint),
        )
    )


def _describe_failure(part: Any, checkpoint: str) -> tuple[Any, ...] | None:
    """Return what identifies the failure of a part whose newest checkpoint was this one."""
    error = part.get("error") if isinstance(part, Mapping) else None
    if not isinstance(error, Mapping) or part.get("status") != "error":
        return None
    if error.get("checkpoint", part.get("resumed_from")) != checkpoint:
        return None
    message = _VARYING.sub("#", str(error.get("message")))
    return error.get("type"), message, error.get("step")


def _describe_choices(checkpoint: Path) -> list[str]:
    saved = [one.path for one in read_checkpoints(checkpoint.parent)[0]]
    earlier = saved[: saved.index(checkpoint)] if checkpoint in saved else saved
    again = f"To try this one again, give its folder: --resume {checkpoint}"
    if not earlier:
        return [f"There is no older checkpoint. {again}"]
    older = f"hookline train CONFIG --resume {earlier[-1]}"
    return [f"To continue from an older checkpoint: {older}", again]
