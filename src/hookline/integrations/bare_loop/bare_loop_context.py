"""The event context of a bare loop.

The session writes it, dispatchers read it. What the loop has not provided raises `NotSuppliedError`
with the call that would provide it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hookline.context import LazyFloat, Metrics, State, StepContext
from hookline.errors import NotSuppliedError
from hookline.integrations.bare_loop.requirements import CALLS, not_supplied
from hookline.loop.event_context import EventContext, device_of
from hookline.loop.means import Means

__all__ = ["BareLoopEventContext", "Batch", "ProbeContext"]


@dataclass
class Batch:
    """A batch that the loop loads through the session."""

    batch: Any
    index: int
    loader_idx: int
    loader_name: str
    logged: dict[str, Any] = field(default_factory=dict)
    ended: bool = False


class BareLoopEventContext(EventContext):
    """The arguments of events in a bare loop."""

    def __init__(
        self,
        trainer: Any,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        config: Any,
    ) -> None:
        super().__init__(trainer, model, optimizers)
        # What the loop may not provide is None here, and an error where a hook asks for it.
        self.known_config = config
        self.known_epoch: int | None = None
        self.known_batch: Batch | None = None
        self.known_tokens: int | None = None
        self.known_loss: Any = None
        self.why_no_loss = f". {CALLS['backward']}"
        self.latest_loss: LazyFloat | None = None
        self.means = Means()
        self.metrics = Metrics()

    # -- what the loop may not provide -----------------------------------------------------------

    @property
    def epoch(self) -> int:
        if self.known_epoch is None:
            raise not_supplied("epoch")
        return self.known_epoch

    @property
    def batch(self) -> Any:
        return self._in_batch("batch").batch

    @property
    def batch_idx(self) -> int:
        return self._in_batch("batch_idx").index

    @property
    def dataloader_idx(self) -> int:
        return self._in_batch("dataloader_idx").loader_idx

    @property
    def dataloader_name(self) -> str:
        return self._in_batch("dataloader_name").loader_name

    def _in_batch(self, name: str) -> Batch:
        if self.known_batch is None:
            raise not_supplied(name)
        return self.known_batch

    @property
    def config(self) -> Any:
        if self.known_config is None:
            raise not_supplied("config")
        return self.known_config

    @property
    def run(self) -> Any:
        raise not_supplied("run")

    @property
    def tokens_seen(self) -> int:
        if self.known_tokens is None:
            raise not_supplied("tokens_seen")
        return self.known_tokens

    @property
    def loss(self) -> Any:
        return self._required_loss(self.known_loss)

    def _required_loss(self, loss: Any) -> Any:
        if loss is None:
            raise NotSuppliedError(f"This loop has not provided 'loss'{self.why_no_loss}")
        return loss

    # -- what is made when it is read -------------------------------------------------------------

    @property
    def ctx(self) -> StepContext:
        return StepContext(
            step=self.step,
            loss=self._later("loss") if self.known_loss is None else self.known_loss,
            grad_norm=self.norm_of_this_step(),
            lr=self.lr,
            tokens_seen=self._later("tokens_seen")
            if self.known_tokens is None
            else self.known_tokens,
            model=self.model,
            optimizer=self.optimizer,
            skipped=self.skipped,
        )

    def _later(self, name: str) -> Any:
        return lambda: getattr(self, name)

    @property
    def state(self) -> State:
        known: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "device": device_of(self.model),
            "model_params": self.model_params,
            "status": self.status,
        }
        absent: dict[str, str] = {}
        for key, read in (
            ("current_epoch", lambda: self.epoch),
            ("current_batch_idx", lambda: self.batch_idx),
            ("latest_loss", lambda: self._required_loss(self.latest_loss)),
            ("avg_loss", lambda: self._required_loss(self.means.mean("train/loss"))),
        ):
            try:
                known[key] = read()
            except NotSuppliedError as error:
                absent[key] = str(error)
        return State(known, absent)


class ProbeContext:
    """The context as probes read it: what the loop has not provided is None."""

    def __init__(self, context: BareLoopEventContext) -> None:
        self._context = context

    @property
    def trainer(self) -> Any:
        return self._context.trainer

    @property
    def step(self) -> int:
        return self._context.step

    @property
    def step_in_progress(self) -> int:
        return self._context.step_in_progress

    @property
    def epoch(self) -> int | None:
        return self._context.known_epoch

    @property
    def evaluating(self) -> bool:
        return self._context.evaluating
