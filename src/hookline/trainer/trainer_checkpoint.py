"""A trainer as a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.checkpoint import find_checkpoint, load_checkpoint, point, save_checkpoint
from hookline.errors import CheckpointError, TrainingError
from hookline.runs.checkpoint_reader import differences
from hookline.runs.diff import diff_configs
from hookline.runs.jsonable import plain
from hookline.runs.masking import masked
from hookline.runs.run_reader import OpenedRun

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

__all__ = ["load_trainer_checkpoint", "save_trainer_checkpoint"]

_SHOWN = 5


def save_trainer_checkpoint(trainer: Trainer, folder: Path) -> Path:
    """Save all that a resumed run needs into this folder; return where it is."""
    context, scaler = trainer._context, trainer.strategy.scaler
    position = trainer._position.state_dict(trainer.device)
    state = {
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in trainer.schedulers],
        "scaler": None if scaler is None else scaler.state_dict(),
        "hooks": trainer.hooks.state_dict(),
        "disabled": [info.name for info in trainer.hooks.describe() if not info.enabled],
        "position": position,
        "means": context.means.state_dict(),
        "step": context.step,
        "round": trainer._round,
        "pending_gradients": _pending_gradients(trainer),
        "tokens_seen": context.tokens_seen,
        "best_accuracy": trainer.best_accuracy,
    }
    info = {
        "step": context.step,
        "epoch": context.epoch,
        "run_id": None if context.run is None else context.run.id,
        "metrics": position["validated"],
    }
    weights = trainer.strategy.save(trainer.model)
    saved = save_checkpoint(folder, model=weights, state=state, info=info)
    point(saved.parent, "last", saved)
    return saved


def load_trainer_checkpoint(trainer: Trainer, path: Any) -> Path:
    """Give a trainer everything back that was saved; return where the checkpoint is."""
    found = find_checkpoint(Path(path))
    checkpoint = load_checkpoint(found)
    state, context = checkpoint.state, trainer._context
    for what in ("optimizers", "schedulers"):
        saved, here = len(state[what]), len(getattr(trainer, what))
        if saved != here:
            raise TrainingError(
                f"The checkpoint {found} has {saved} {what}, this trainer {here}. Resume with the "
                "trainer of the run."
            )
    _load_weights(trainer, found, checkpoint.model)
    for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(trainer.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if trainer.strategy.scaler is not None and state["scaler"] is not None:
        trainer.strategy.scaler.load_state_dict(state["scaler"])
    trainer.hooks.load_state_dict(state["hooks"])
    for name in state["disabled"]:
        if name in trainer.hooks:
            trainer.hooks.disable_hook(name)
    context.step, context.step_in_progress = state["step"], state["step"] + 1
    context.tokens_seen = state["tokens_seen"]
    trainer._round = state["round"]
    context.means.load_state_dict(state["means"])
    trainer.best_accuracy = state["best_accuracy"]
    trainer._position.load_state_dict(state["position"], trainer.device)
    trainer._position.check_resumable(trainer._stream())
    _load_pending_gradients(trainer, state["pending_gradients"])
    context.epoch = trainer._position.epoch
    return found


def _pending_gradients(trainer: Trainer) -> list[list[Any] | None]:
    """Return the gradients of each optimizer that does not step in every step, else None."""
    return [
        None
        if every == 1
        else [p.grad for group in optimizer.param_groups for p in group["params"]]
        for optimizer, every in zip(trainer.optimizers, trainer._every, strict=True)
    ]


def _load_pending_gradients(trainer: Trainer, saved: list[list[Any] | None]) -> None:
    for optimizer, gradients in zip(trainer.optimizers, saved, strict=True):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, gradient in zip(parameters, gradients or (), strict=gradients is not None):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _load_weights(trainer: Trainer, found: Path, weights: Mapping[str, Any]) -> None:
    try:
        trainer.strategy.load(trainer.model, weights)
    except RuntimeError as error:
        model = trainer.model
        lines = differences(weights, trainer.strategy.save(model)) or [str(error)]
        lines += _other_settings(trainer, found.parent.parent)
        raise CheckpointError(
            f"The checkpoint {found} does not fit this {type(model).__name__}. Resume with the "
            "model of the run, or begin another run.\n  " + "\n  ".join(lines)
        ) from error


def _other_settings(trainer: Trainer, folder: Path) -> list[str]:
    """Which settings of the run are others now, in a line; none where nobody knows."""
    before = OpenedRun(folder).manifest.get("config")
    if not isinstance(before, dict):
        return []
    pairs = diff_configs(before, plain(masked(trainer.config.model_dump(mode="json"))))
    told = [f"{name} was {was!r} and is {now!r}" for name, (was, now) in pairs.items()]
    if len(told) > _SHOWN:
        told = [*told[:_SHOWN], f"and {len(told) - _SHOWN} more"]
    return [f"of the configuration, {', '.join(told)}"] if told else []
