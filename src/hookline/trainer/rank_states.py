"""The position in the data for another number of processes than it was saved by.

All of them continue after as many batches as all processes together had trained on, in rank 0's
order of samples, which all processes share.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hookline.errors import CheckpointError
from hookline.loop.processes import OneProcess
from hookline.loop.random_state import random_state

__all__ = ["adapt_position"]

log = logging.getLogger("hookline")


def adapt_position(
    saved: Sequence[Mapping[str, Any]],
    processes: OneProcess,
    length: int | None,
    device: torch.device,
) -> dict[str, Any]:
    """Return the position of this process, from those of all that saved.

    Args:
        saved: the positions, by rank.
        processes: the processes that continue.
        length: the number of batches in an epoch of this process; None if it is not known.
        device: where this process trains.

    Raises:
        CheckpointError: the checkpoint was saved in the middle of an epoch, and its position cannot
            be converted.
    """
    position = saved[0]
    batches = position["batches"] * len(saved)
    if batches:
        _check_position(position, len(saved), processes.size)
    own = batches // processes.size
    own = own if length is None else min(own, length)
    is_new = processes.rank >= len(saved)
    now = random_state(device) if is_new else saved[processes.rank]["now"]
    again = batches - own * processes.size
    log.warning(
        "The checkpoint was saved by %d processes, and this run has %d. It continues after the "
        "same %d batches of the epoch%s, in the same order of samples. What differs from the run "
        "with %d processes: a step has the batches of %d processes, and random numbers, such as "
        "those of dropout, are others.",
        *(len(saved), processes.size, batches),
        f" ({again} of them are trained on again)" if again > 0 else "",
        *(len(saved), processes.size),
    )
    return {**_move(position, own), "now": now}


def _check_position(position: Mapping[str, Any], before: int, now: int) -> None:
    loaders = position["loaders"]
    is_simple = len(loaders) == 1 and not loaders[0]["ended"]
    if not is_simple or "loader" in (loaders[0]["pass"] or {}):
        raise CheckpointError(
            f"The checkpoint was saved by {before} processes in the middle of an epoch, and this "
            f"run has {now}. The position of several loaders, or of a loader that saves its own, "
            f"cannot be converted. Resume with {before} processes, or from a checkpoint at the end "
            "of an epoch."
        )


def _move(position: Mapping[str, Any], batches: int) -> dict[str, Any]:
    """Return the position after so many batches of the same pass."""
    loaders = []
    for loader in position["loaders"]:
        passed = loader["pass"]
        if passed is not None and passed.get("indices") is not None:
            drawn = {"drawn": batches, "recent": [], "is_over": False}
            passed = {**passed, "indices": {**passed["indices"], **drawn}}
        loaders.append({**loader, "pass": passed})
    return {**position, "batches": batches, "loaders": loaders}
