"""The items of a trainer's checkpoint, apart from those of all loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hookline.loop.checkpoints import numbers_in
from hookline.loop.pending_gradients import compare_gradients, load_gradients, save_gradients
from hookline.loop.processes import SingleProcessGroup
from hookline.loop.state import StateItem
from hookline.trainer.data_position import adapt_position, describe_position

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


@dataclass
class EpochProgress:
    """Where a trainer stands in its epoch, apart from the data."""

    round: int = 0  # counts steps, to choose the optimizers that are due
    sanity_due: bool = False  # whether the validation before training has not ended yet
    validation_due: bool = False  # the same for a validation between two steps
    epoch_started: bool = False  # whether on_epoch_start was fired for the current position
    epoch_over: bool = False  # the same for on_epoch_end
    last_epoch: int = 0  # of the checkpoint that was loaded


def make_items(trainer: Trainer) -> list[StateItem]:
    """Return the items of a trainer's state; random states are restored with the position."""
    loop, strategy, progress = trainer.loop, trainer.strategy, trainer.epoch_progress
    tokens, context = trainer.token_count, trainer.loop.context

    def flag(name: str) -> StateItem:
        return StateItem(name, partial(getattr, progress, name), partial(setattr, progress, name))

    def save_position() -> dict[str, Any]:
        validated = numbers_in(context.validated)
        return {**trainer.position.state_dict(trainer.device), "validated": validated}

    def load_position(state: Mapping[str, Any]) -> None:
        context.validated = dict(state["validated"])
        trainer.position.load_state_dict(state, trainer.device)

    def load_step(step: int) -> None:
        context.step, context.step_in_progress = step, step + 1
        for optimizer in trainer.optimizers:
            # Else a scheduler that steps before the next optimizer step warns about their order.
            optimizer._opt_called = step > 0  # type: ignore[attr-defined]

    def load_epoch(epoch: int) -> None:
        position, config = trainer.position, trainer.config
        is_over = position.epoch == trainer.max_epochs or context.step == config.max_steps
        progress.last_epoch = epoch
        context.epoch = epoch if is_over else position.epoch

    def adapt(saved: Sequence[Any], processes: SingleProcessGroup) -> Any:
        length = None if trainer.train_data is None else trainer.train_data.length()
        return adapt_position(saved, processes, length, trainer.device)

    def compare_position(saved: Mapping[str, Any]) -> list[str]:
        val_loaders = () if trainer.val_data is None else trainer.val_data.loaders
        fast_forward = trainer.config.fast_forward
        return describe_position(saved, trainer.train_data, val_loaders, fast_forward=fast_forward)

    return [
        StateItem("step", lambda: context.step, load_step),
        StateItem("tokens_seen", lambda: tokens.count, tokens.restart, _adapt_tokens),
        flag("round"),
        StateItem(
            "pending_gradients",
            partial(_save_gradients, trainer),
            partial(load_gradients, trainer.optimizers),
            compare=partial(compare_gradients, trainer.optimizers),
        ),
        flag("sanity_due"),
        flag("validation_due"),
        flag("epoch_started"),
        flag("epoch_over"),
        StateItem("settings", lambda: trainer.compared_settings),
        StateItem("strategy", strategy.state, strategy.load_state),
        StateItem("position", save_position, load_position, adapt, compare_position, True),
        StateItem("epoch", lambda: loop.context.epoch, load_epoch),
    ]


def _adapt_tokens(saved: Sequence[int], processes: SingleProcessGroup) -> int:
    return sum(saved) // processes.size


def _save_gradients(trainer: Trainer) -> list[list[Any] | None]:
    """Return the gradients of optimizers that do not step in every step."""
    every = trainer.config.optimizer_every or [1] * len(trainer.optimizers)
    return save_gradients(trainer.optimizers, [n > 1 for n in every])
