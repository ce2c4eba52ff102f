"""Hooks as users write them, for mypy and pyright in strict mode; the tests also register them."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

import hookline
from hookline import Hook, HookManager, HookRunner, StepContext, TrainerHooks, TrainingHook


class Lifecycle(TrainerHooks):
    def __init__(self, threshold: float = 10.0) -> None:
        super().__init__()
        self.threshold = threshold

    def on_train_start(self, trainer: Any) -> None: ...

    def on_train_batch_end(
        self,
        trainer: Any,
        batch: object,
        loader_idx: int,
        loader_name: str,
        metrics: dict[str, float],
    ) -> None: ...

    def on_training_end(self, trainer: Any) -> None: ...


class Named(TrainingHook):
    def __init__(self) -> None:
        super().__init__("named")
        self.enabled = True
        self.sample_rate = 0.5
        self.name = "mine"

    @override
    def on_batch_end(self, batch_idx: int, loss: float, state: dict[str, Any]) -> None: ...


class LargeScale(TrainingHook):
    def on_train_begin(self, config: object) -> None: ...
    def on_step_end(self, ctx: StepContext) -> None:
        self.last = ctx.loss + ctx.grad_norm

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None: ...
    def on_checkpoint_save(self, step: int, path: str) -> None: ...
    def on_train_end(self, step: int, tokens_seen: int) -> None: ...


class Everything(Hook):
    @override
    def on_step_end(self, *args: Any, **kwargs: Any) -> None: ...

    @staticmethod
    def on_epoch_end(epoch: int) -> None: ...

    @classmethod
    def on_epoch_start(cls, epoch: int) -> None: ...

    def on_before_backward(self, loss: torch.Tensor) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


def use(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    manager = HookManager([Lifecycle(), Named()])
    name: str = manager.add_hook(Everything(), every=10, after="named")
    manager.disable_hook(name)
    manager.fire("on_epoch_end", epoch=3)
    runner = HookRunner([LargeScale()])
    runner.on_train_begin({})
    runner.on_step_end(StepContext(1, 0.5, 1.0, 0.1, 64, model, optimizer))
    runner.on_train_end(1, 64)
    with hookline.attach(model, optimizer, hooks=[Everything()]) as session:
        with session.epoch() as epoch:
            for batch in session.batches([torch.ones(2)], name=f"epoch {epoch}"):
                session.log("size", float(batch.numel()))
        shares: list[float] = [info.share for info in session.hooks.describe()]
        print(shares)
