"""What a checkpoint of a trainer consists of, and restoring a trainer from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.checkpoint import find_checkpoint, load_checkpoint
from hookline.checkpoint.state_tree import Encoder, decode
from hookline.errors import CheckpointError, TrainingError
from hookline.runs.checkpoint_reader import describe_mismatches
from hookline.runs.diff import diff_configs
from hookline.runs.jsonable import mask_secrets, to_jsonable
from hookline.runs.run_lookup import find_run_of_checkpoint
from hookline.runs.run_reader import OpenedRun

if TYPE_CHECKING:
    from hookline.trainer.trainer_base import TrainerBase

__all__ = [
    "collect_checkpoint",
    "decode_states",
    "encode_states",
    "find_start",
    "load_trainer_checkpoint",
]

_SHOWN = 5


def collect_checkpoint(trainer: TrainerBase) -> dict[str, Any]:
    """Return what a checkpoint of the trainer consists of: `model`, `state` and `info`."""
    state = trainer.state_dict()
    info = {
        "step": trainer.step,
        "epoch": trainer.epoch,
        "tokens_seen": trainer.known_tokens,
        "run_id": None if trainer.run is None else trainer.run.id,
        "metrics": state["position"]["validated"],
    }
    return {"model": trainer.strategy.save(trainer.model), "state": state, "info": info}


def encode_states(states: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return a copy of hook states that does not change; the tensors in it are not copied."""
    encoder = Encoder("hooks")
    return encoder.encode(dict(states)), encoder.tensors


def decode_states(encoded: tuple[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states that `encode_states` was given."""
    states: dict[str, Any] = decode(*encoded)
    return states


def find_start(trainer: TrainerBase, resume_from: Any) -> Path | None:
    """Return the checkpoint that training continues from; None to start a new run.

    Args:
        trainer: the trainer.
        resume_from: the folder or URL of a checkpoint or run, or "auto".
    """
    given = os.fspath(resume_from)
    if given == "auto":
        raise NotImplementedError
    if "://" in given:
        raise NotImplementedError
    return find_checkpoint(Path(given))


def load_trainer_checkpoint(trainer: TrainerBase, found: Path) -> None:
    """Restore a trainer from a checkpoint."""
    checkpoint = load_checkpoint(found)
    for what in ("optimizers", "schedulers"):
        saved, here = len(checkpoint.state[what]), len(getattr(trainer, what))
        if saved != here:
            raise TrainingError(
                f"The checkpoint {found} has {saved} {what}, this trainer {here}. Resume with the "
                "trainer of the run."
            )
    _load_weights(trainer, found, checkpoint.model)
    trainer.load_state_dict(checkpoint.state)


def _load_weights(trainer: TrainerBase, found: Path, weights: Mapping[str, Any]) -> None:
    try:
        trainer.strategy.load(trainer.model, weights)
    except RuntimeError as error:
        model = trainer.model
        lines = describe_mismatches(weights, trainer.strategy.save(model)) or [str(error)]
        lines += _other_settings(trainer, find_run_of_checkpoint(found))
        raise CheckpointError(
            f"The checkpoint {found} does not fit this {type(model).__name__}. Resume with the "
            "model of the run, or start a new run.\n  " + "\n  ".join(lines)
        ) from error


def _other_settings(trainer: TrainerBase, folder: Path | None) -> list[str]:
    """Return a line about the settings that differ from those of the run, if they are known."""
    before = None if folder is None else OpenedRun(folder).manifest.get("config")
    if not isinstance(before, dict):
        return []
    pairs = diff_configs(before, to_jsonable(mask_secrets(trainer.config.model_dump(mode="json"))))
    changes = [f"{name} was {was!r} and is {now!r}" for name, (was, now) in pairs.items()]
    if len(changes) > _SHOWN:
        changes = [*changes[:_SHOWN], f"and {len(changes) - _SHOWN} more"]
    return [f"of the configuration, {', '.join(changes)}"] if changes else []
