"""The state of a session as a dict, for checkpoints that the loop or its library writes.

All but tensors is JSON in one string: such checkpoints are read by `torch.load`, which refuses
other types unless it may run code.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hookline.arguments import check_mapping, show_value
from hookline.checkpoint.checkpoint_folder import Checkpoint
from hookline.checkpoint.state_tree import Encoder, decode
from hookline.errors import CheckpointError, listed
from hookline.files.strict_json import MAX_STATE_DEPTH, parse_json
from hookline.loop.saved_state import check_host_state, reported_damage

__all__ = ["pack_state", "unpack_state"]

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
        check_host_state(checkpoint)
    return checkpoint.state
