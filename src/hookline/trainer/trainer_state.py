"""The state of a trainer, as checkpoints have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.arguments import check_mapping
from hookline.errors import CheckpointError
from hookline.tensors.sharded import shard_like
from hookline.trainer.strategies import parameters_of
from hookline.trainer.trainer_base import TrainerBase

__all__ = ["TrainerState"]


class TrainerState(TrainerBase):
    """A trainer whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, apart from the model's weights."""
        context, scaler = self._context, self.strategy.scaler
        return {
            "classes": {
                "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
                "schedulers": [type(scheduler).__name__ for scheduler in self.schedulers],
            },
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if scaler is None else scaler.state_dict(),
            "hooks": self.hooks.state_dict(),
            "attributes": self._attribute_states(),
            "disabled": [info.name for info in self.hooks.describe() if info.status == "disabled"],
            "position": self._position.state_dict(self.device),
            "means": context.means.state_dict(),
            "step": context.step,
            "epoch": context.epoch,
            "round": self._optimizer_round,
            "pending_gradients": self._pending_gradients(),
            "tokens_seen": context.counted_tokens,
            "best_accuracy": self.best_accuracy,
            "sanity_due": self._sanity_due,
            "validation_due": self._validation_due,
            "epoch_started": self._epoch_started,
            "epoch_over": self._epoch_over,
            "run": self._recorder.position(),
            "settings": self._settings,
            "ranks": self._rank_states,
            "strategy": self.strategy.state(),
            **self._before_validation,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: the run cannot be resumed exactly with this trainer's data.
        """
        state = check_mapping("load_state_dict(state)", state)
        if "optimizers" not in state or "position" not in state:
            raise CheckpointError("load_state_dict(state) takes what state_dict() returned.")
        context, scaler = self._context, self.strategy.scaler
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            self.strategy.load_optimizer(optimizer, saved)
            # Else a scheduler that steps before the next optimizer step warns about their order.
            optimizer._opt_called = state["step"] > 0  # type: ignore[attr-defined]
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if scaler is not None and state["scaler"] is not None:
            scaler.load_state_dict(state["scaler"])
        self.hooks.load_state_dict(state["hooks"])
        self._load_attribute_states(state["attributes"])
        self.strategy.load_state(state.get("strategy", {}))
        for name in state["disabled"]:
            if name in self.hooks:
                self.hooks.disable_hook(name)
        context.step, context.step_in_progress = state["step"], state["step"] + 1
        context.counted_tokens = state["tokens_seen"]
        self._optimizer_round = state["round"]
        self._load_pending_gradients(state["pending_gradients"])
        context.means.load_state_dict(state["means"])
        self.best_accuracy = state["best_accuracy"]
        self._sanity_due, self._validation_due = state["sanity_due"], state["validation_due"]
        self._epoch_started = state.get("epoch_started", False)
        self._epoch_over, self._run_position = state["epoch_over"], state.get("run")
        self._position.load_state_dict(state["position"], self.device)
        finished = self._position.epoch == self.max_epochs or context.step == self.config.max_steps
        self._last_epoch = state["epoch"]
        context.epoch = self._last_epoch if finished else self._position.epoch

    def _rank_state(self) -> dict[str, Any]:
        """Return the part of the state that each process has of its own."""
        return {
            "position": self._position.state_dict(self.device),
            "means": self._context.means.state_dict(),
            "tokens_seen": self._context.counted_tokens,
        }

    def _pending_gradients(self) -> list[list[Any] | None]:
        """Return the gradients of each optimizer that does not step in every step, else None."""
        every = self.config.optimizer_every or [1] * len(self.optimizers)
        return [
            None if n == 1 else [p.grad for p in parameters_of(optimizer)]
            for optimizer, n in zip(self.optimizers, every, strict=True)
        ]

    def _load_pending_gradients(self, saved: list[list[Any] | None]) -> None:
        for optimizer, gradients in zip(self.optimizers, saved, strict=True):
            if gradients is not None:
                for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
                    parameter.grad = None
                    if gradient is not None:
                        parameter.grad = shard_like(gradient.to(parameter.device), parameter)
