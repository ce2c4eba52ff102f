"""LRMonitor: logs learning rates, momentum and weight decay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import PositiveInt

from hookline.hooks.monitoring.monitor_bases import TrainingMonitor
from hookline.loop.loop import loop_of


class LRMonitor(TrainingMonitor):
    """Logs the learning rate of each step, for every parameter group of every optimizer.

    The metrics are named after the optimizer's class: `lr/SGD`, `momentum/SGD` and
    `weight_decay/SGD`; a second optimizer of the class is `SGD_2`. Optimizers that have names, as
    in `attach(model, {"generator": …})`, keep these: `lr/generator`. For an optimizer with several
    parameter groups the names end with `/group_0`, `/group_1`, …

    Args:
        log_momentum: also log momentum; for optimizers like Adam, the first of the betas.
        log_weight_decay: also log weight decay.
        every: log in every `"step"`, in every N-th step, or at the end of each `"epoch"` the values
            of its last step. Nothing is logged for a skipped step.
    """

    cost = (
        "Reads the optimizers' settings in every step; an lr on a device is copied without waiting."
    )
    ranks = "main"
    every_name = "frequency"
    logs_rates = True

    def __init__(
        self,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        every: Literal["step", "epoch"] | PositiveInt = "step",
    ) -> None:
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.every = every
        self._used: dict[tuple[str, int, str, str], Any] = {}  # kind, optimizer, class, group
        # The other event is turned off, so that a bare loop need not provide epochs.
        self.__dict__["on_step_end" if every == "epoch" else "on_epoch_end"] = None

    def on_train_start(self) -> None:
        self._used = {}

    def on_after_optimizer_step(self, optimizers: Sequence[Any], optimizer_idx: int) -> None:
        """Keep the optimizer's settings, before its scheduler changes them."""
        groups = optimizers[optimizer_idx].param_groups
        name = _name(optimizers, optimizer_idx)
        for i, group in enumerate(groups):
            suffix = f"/group_{i}" if len(groups) > 1 else ""
            for kind, value in self._values(group):
                # Copied, because schedulers change tensors in place.
                used = value.detach().clone() if isinstance(value, torch.Tensor) else value
                self._used[kind, optimizer_idx, name, suffix] = used

    def on_step_end(self, trainer: Any, step: int) -> None:
        if self.every == "step" or step % int(self.every) == 0:
            self._log(trainer)
        self._used = {}

    def on_epoch_end(self, trainer: Any) -> None:
        self._log(trainer)

    def _values(self, group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        if "lr" in group:
            yield "lr", group["lr"]
        if self.log_momentum:
            if "momentum" in group:
                yield "momentum", group["momentum"]
            elif "betas" in group:
                yield "momentum", group["betas"][0]
        if self.log_weight_decay and "weight_decay" in group:
            yield "weight_decay", group["weight_decay"]

    def _log(self, trainer: Any) -> None:
        loop = loop_of(trainer)
        names = () if loop is None else loop.context.optimizer_names
        for (kind, i, name, suffix), value in self._used.items():
            trainer.log(f"{kind}/{names[i] if names else name}{suffix}", value)


def _name(optimizers: Sequence[Any], idx: int) -> str:
    """Return the optimizer's class name, numbered from the second of that class on."""
    kinds = [type(optimizer).__name__ for optimizer in optimizers[: idx + 1]]
    number = Counter(kinds)[kinds[-1]]
    return kinds[-1] if number == 1 else f"{kinds[-1]}_{number}"
