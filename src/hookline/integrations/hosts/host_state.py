"""What is saved of hooks with a host's checkpoints, and which of these checkpoints are complete.

A host that writes a checkpoint straight into its final folder leaves an incomplete one when it is
killed. So a complete one gets a file that lists its files, written after all of them are on the
disk.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.checkpoint import load_checkpoint, save_checkpoint
from hookline.checkpoint.host_folders import HOOKS_FOLDER, mark_complete, unmark
from hookline.checkpoint.state_tree import Encoder
from hookline.errors import CheckpointError, CollectiveError
from hookline.loop.processes import is_main_process
from hookline.loop.saved_state import check_host_state, reported_damage
from hookline.tensors.full_tensor import full_tensor

if TYPE_CHECKING:
    from hookline.integrations.hosts.host_session import HostSession

__all__ = ["HOOKS_FOLDER", "load", "pack", "save"]

log = logging.getLogger("hookline")


def save(sessions: Mapping[str, HostSession], folder: Path) -> bool:
    """Save the hooks' state in a host's checkpoint, and mark it as complete; on the first rank.

    Args:
        sessions: each session, by the name of its folder in the checkpoint.
        folder: the checkpoint. All ranks call this: what is sharded is gathered.

    Returns:
        Whether the checkpoint is complete, as far as this rank knows. A failure is logged: the
        host's checkpoint itself is there.
    """
    try:
        states = {name: full_tensor(session.collect_state()) for name, session in sessions.items()}
        if not is_main_process():
            return True
        for name, session in sessions.items():
            unmark(folder, name)  # the host may have written this checkpoint again
            _save_state(session, folder / name, states[name])
        mark_complete(folder)
    except (CheckpointError, CollectiveError, OSError) as error:
        log.warning("The state of the hooks was not saved with %s: %s", folder, error)
        return False
    return True


def _save_state(session: HostSession, folder: Path, state: dict[str, Any]) -> None:
    info = {"step": session.step, "epoch": state["epoch"], "run_id": state["run_id"]}
    save_checkpoint(folder, model={}, state=state, info=info)
    if session.run is not None:
        session.run.flush(durable=True)


def pack(session: HostSession) -> dict[str, Any]:
    """Return the hooks' state for a file that the host writes, as `unpack_state` reads it.

    All ranks call this: what is sharded is gathered.
    """
    encoder = Encoder("session")
    tree = encoder.encode(full_tensor(session.collect_state()))
    text = json.dumps(tree, allow_nan=False)
    return {"version": 1, "state": text, "tensors": dict(encoder.tensors)}


def load(folder: Path, name: str = HOOKS_FOLDER) -> dict[str, Any] | None:
    """Return what was saved of the hooks in a host's checkpoint; None if nothing was."""
    if not os.path.lexists(folder / name):
        return None
    checkpoint = load_checkpoint(folder / name)
    with reported_damage(checkpoint):
        check_host_state(checkpoint)
        return checkpoint.state
