"""The part of a checkpoint that each process has of its own, also for another number of processes.

The position in the data, the means of the epoch, the number of tokens and the random states are
those of one process. With another number of processes, all of them continue after as many batches
as all processes together had trained on, in rank 0's order of samples, which all processes share.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.errors import CheckpointError
from hookline.loop.means import add_means
from hookline.loop.random_state import random_state

if TYPE_CHECKING:
    from hookline.trainer.trainer_base import TrainerBase

__all__ = ["adapt_rank_states"]

log = logging.getLogger("hookline")

_PARTS = ("position", "means", "tokens_seen")


def adapt_rank_states(trainer: TrainerBase, state: dict[str, Any]) -> None:
    """Replace the parts of a checkpoint's state that each process has by those of this process.

    Raises:
        CheckpointError: the checkpoint is of another number of processes, in the middle of an
            epoch, and its position cannot be converted.
    """
    saved = state.pop("ranks", None) or [{name: state[name] for name in _PARTS}]
    processes = trainer.strategy.processes
    if len(saved) == processes.size:
        state.update(saved[processes.rank])
        return
    position = saved[0]["position"]
    batches = position["batches"] * len(saved)
    if batches:
        _check_position(position, len(saved), processes.size)
    length = None if trainer.train_data is None else trainer.train_data.length()
    own = batches // processes.size
    own = own if length is None else min(own, length)
    is_new = processes.rank >= len(saved)
    now = random_state(trainer.device) if is_new else saved[processes.rank]["position"]["now"]
    state["position"] = {**_move(position, own), "now": now}
    state["means"] = add_means([one["means"] for one in saved]) if processes.is_main else {}
    state["tokens_seen"] = sum(one["tokens_seen"] for one in saved) // processes.size
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
