"""A trainer as a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.checkpoint import find_checkpoint, load_checkpoint, point, save_checkpoint
from hookline.errors import TrainingError

if TYPE_CHECKING:
    from hookline.trainer import Trainer

__all__ = ["load_snapshot", "save_snapshot"]


def save_snapshot(trainer: Trainer, folder: Path) -> Path:
    """Save all that a resumed run needs into this folder; return where it is."""
    moment, scaler = trainer._moment, trainer._strategy.scaler
    position = trainer._position.state_dict(trainer.device)
    state = {
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in trainer.schedulers],
        "scaler": None if scaler is None else scaler.state_dict(),
        "hooks": trainer.hooks.state_dict(),
        "disabled": [info.name for info in trainer.hooks.describe() if not info.enabled],
        "position": position,
        "means": moment.means.state_dict(),
        "step": moment.step,
        "round": trainer._round,
        "tokens_seen": moment.tokens_seen,
        "best_accuracy": trainer.best_accuracy,
    }
    info = {
        "step": moment.step,
        "epoch": moment.epoch,
        "run_id": None if moment.run is None else moment.run.id,
        "metrics": position["validated"],
    }
    weights = trainer._strategy.save(trainer.model)
    saved = save_checkpoint(folder, model=weights, state=state, info=info)
    point(saved.parent, "last", saved)
    return saved


def load_snapshot(trainer: Trainer, path: Any) -> Path:
    """Give a trainer everything back that was saved; return where the checkpoint is."""
    found = find_checkpoint(Path(path))
    checkpoint = load_checkpoint(found)
    state, moment = checkpoint.state, trainer._moment
    for what in ("optimizers", "schedulers"):
        saved, here = len(state[what]), len(getattr(trainer, what))
        if saved != here:
            raise TrainingError(
                f"The checkpoint {found} has {saved} {what}, this trainer {here}. Resume with the "
                "trainer of the run."
            )
    trainer._strategy.load(trainer.model, checkpoint.model)
    for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(trainer.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if trainer._strategy.scaler is not None and state["scaler"] is not None:
        trainer._strategy.scaler.load_state_dict(state["scaler"])
    trainer.hooks.load_state_dict(state["hooks"])
    for name in state["disabled"]:
        if name in trainer.hooks:
            trainer.hooks.disable_hook(name)
    moment.step, moment.step_in_progress = state["step"], state["step"] + 1
    moment.tokens_seen = state["tokens_seen"]
    trainer._round = state["round"]
    moment.means.load_state_dict(state["means"])
    trainer.best_accuracy = state["best_accuracy"]
    trainer._position.load_state_dict(state["position"], trainer.device)
    moment.epoch = trainer._position.epoch
    return found
