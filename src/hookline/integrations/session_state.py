"""The state of sessions in checkpoints that the loop, or another library, writes.

In a file that `torch.load` reads, all but tensors is JSON in one string: it refuses other types
unless it may run code. In a checkpoint folder, each session has a folder. A library that writes
straight into its final folder leaves an incomplete checkpoint when it is killed. So a complete one
gets a file that lists its files, written after all of them are on the disk.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline.arguments import check_mapping, show_value
from hookline.checkpoint import load_checkpoint, save_checkpoint
from hookline.checkpoint.completion_files import (
    HOOKS_FOLDER,
    remove_completion_file,
    write_completion_file,
)
from hookline.checkpoint.folder import Checkpoint
from hookline.checkpoint.snapshot import Encoder, decode
from hookline.errors import CheckpointError, CollectiveError, listed
from hookline.files import MAX_STATE_DEPTH, parse_json
from hookline.loop.processes import is_main_process
from hookline.loop.saved_state import check_library_state, reported_damage
from hookline.tensors.full_tensor import full_tensor

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.session import Session

log = logging.getLogger("hookline")

_VERSION = 1


def pack_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a session as a string and tensors."""
    encoder = Encoder("session")
    tree = encoder.encode(state)
    if encoder.shards:
        raise CheckpointError(
            "session.state_dict() cannot hold sharded tensors, which hooks or updates have: "
            f"{', '.join(encoder.shards)}. Save a checkpoint with `session.save_checkpoint()`."
        )
    return {
        "version": _VERSION,
        "state": json.dumps(tree, allow_nan=False),
        "tensors": dict(encoder.tensors),
    }


def unpack_state(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the state that was packed, checked."""
    given = check_mapping("load_state_dict(state_dict)", given)
    text, tensors, version = given.get("state"), given.get("tensors"), given.get("version")
    if not isinstance(text, str) or not isinstance(tensors, Mapping) or version != _VERSION:
        raise CheckpointError(
            f"The state of the hooks in {path} is damaged, or of another version of Hookline. "
            "load_state_dict() takes what session.state_dict() returned: a dict with 'version' "
            f"{_VERSION}, a string 'state' and the 'tensors'. This one has version "
            f"{show_value(version)} and {listed(given)}. Load another checkpoint."
        )
    checkpoint = Checkpoint(path, {}, OrderedDict(), {})
    with reported_damage(checkpoint):
        own = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        checkpoint.state.update(decode(parse_json(text.encode(), MAX_STATE_DEPTH), own))
        check_library_state(checkpoint)
    return checkpoint.state


def save(sessions: Mapping[str, Session], folder: Path) -> bool:
    """Save the hooks' state in a library's checkpoint, and a completion file; on the first rank.

    Args:
        sessions: each session, by the name of its folder in the checkpoint.
        folder: the checkpoint. All ranks call this: what is sharded is gathered.

    Returns:
        Whether the checkpoint is complete, as far as this rank knows. A failure is logged: the
        library's checkpoint itself is there.
    """
    try:
        states = {name: full_tensor(session.collect_state()) for name, session in sessions.items()}
        if not is_main_process():
            return True
        for name, session in sessions.items():
            remove_completion_file(folder, name)  # the library may have saved it again
            _save_state(session, folder / name, states[name])
        write_completion_file(folder)
    except (CheckpointError, CollectiveError, OSError) as error:
        log.warning("The state of the hooks was not saved with %s: %s", folder, error)
        return False
    return True


def _save_state(session: Session, folder: Path, state: dict[str, Any]) -> None:
    info = {"step": session.step, "epoch": state["epoch"], "run_id": state["run_id"]}
    save_checkpoint(folder, model={}, state=state, info=info)
    if session.run is not None:
        session.run.flush(durable=True)


def load(folder: Path, name: str = HOOKS_FOLDER) -> dict[str, Any] | None:
    """Return what was saved of the hooks in another library's checkpoint; None if nothing was."""
    if not os.path.lexists(folder / name):
        return None
    checkpoint = load_checkpoint(folder / name)
    with reported_damage(checkpoint):
        check_library_state(checkpoint)
        return checkpoint.state
