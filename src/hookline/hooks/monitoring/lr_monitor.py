"""LRMonitor: the rates that optimizers use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from hookline.hook import Rank
from hookline.options import BuiltIn

__all__ = ["LRMonitor"]


class LRMonitor(BuiltIn):
    """Logs the learning rate that each step used, for every parameter group of every optimizer.

    The names are `lr/SGD`, `momentum/SGD` and `weight_decay/SGD` after the optimizer's class;
    another optimizer of that class is `SGD_2`. Where an optimizer has several parameter groups,
    its names end with `/group_0`, `/group_1`, …

    Args:
        log_momentum: log momentum too; for Adam and its like, the first of the betas.
        log_weight_decay: log weight decay too.
        frequency: log in every step, or what the last step used at the end of each epoch. A step
            that was skipped has used no rate.
    """

    cost = "Reads numbers from the optimizers in every step; a rate on a device is copied, unread."
    hookline_rank = Rank.MONITOR

    def __init__(
        self,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        frequency: Literal["step", "epoch"] = "step",
    ) -> None:
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.frequency = frequency
        self._used: dict[str, Any] = {}
        # The other event is switched off: a bare loop need not tell epochs when nobody listens.
        self.__dict__["on_epoch_end" if frequency == "step" else "on_step_end"] = None

    def on_train_start(self) -> None:
        """Forget an earlier training."""
        self._used = {}

    def on_after_optimizer_step(self, optimizers: Sequence[Any], optimizer_idx: int) -> None:
        """Note what the optimizer has used: its scheduler has not stepped yet."""
        groups = optimizers[optimizer_idx].param_groups
        name = _name(optimizers, optimizer_idx)
        for i, group in enumerate(groups):
            end = f"{name}/group_{i}" if len(groups) > 1 else name
            for kind, value in self._values(group):
                self._used[f"{kind}/{end}"] = _kept(value)

    def on_step_end(self, trainer: Any) -> None:
        """Log what this step used."""
        self._log(trainer)
        self._used = {}

    def on_epoch_end(self, trainer: Any) -> None:
        """Log what the last step used."""
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
        for name, value in self._used.items():
            trainer.log(name, value)


def _name(optimizers: Sequence[Any], idx: int) -> str:
    """The optimizer's class, with a number from the second of that class on."""
    kinds = [type(optimizer).__name__ for optimizer in optimizers[: idx + 1]]
    number = Counter(kinds)[kinds[-1]]
    return kinds[-1] if number == 1 else f"{kinds[-1]}_{number}"


def _kept(value: Any) -> Any:
    """A rate that is a tensor is changed in place by schedulers; a copy of it is not."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
