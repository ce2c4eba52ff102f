"""Saving a trainer as a checkpoint, and restoring it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, set_pointer
from hookline.errors import CheckpointError, TrainingError
from hookline.runs.checkpoint_reader import describe_mismatches
from hookline.runs.diff import diff_configs
from hookline.runs.jsonable import mask_secrets, to_jsonable
from hookline.runs.run_lookup import find_run_of_checkpoint
from hookline.runs.run_reader import OpenedRun

if TYPE_CHECKING:
    from hookline.trainer.trainer_base import TrainerBase

__all__ = ["load_trainer_checkpoint", "save_trainer_checkpoint"]

_SHOWN = 5


def save_trainer_checkpoint(trainer: TrainerBase, folder: Path) -> Path:
    """Save all that a resumed run needs into this folder; return it."""
    state = trainer.state_dict()
    info = {
        "step": trainer.step,
        "epoch": trainer.epoch,
        "run_id": None if trainer.run is None else trainer.run.id,
        "metrics": state["position"]["validated"],
    }
    weights = trainer.strategy.save(trainer.model)
    saved = save_checkpoint(folder, model=weights, state=state, info=info)
    set_pointer(saved.parent, "last", saved)
    return saved


def load_trainer_checkpoint(trainer: TrainerBase, path: Any) -> Path:
    """Restore a trainer from a checkpoint, or the last one of a run; return the checkpoint."""
    found = find_checkpoint(Path(path))
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
    return found


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
