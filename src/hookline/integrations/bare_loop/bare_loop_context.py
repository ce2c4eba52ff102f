"""Where a bare loop stands: the arguments of its events, as attributes.

The session writes it, dispatchers read it. What this loop has not told raises `NotSuppliedError`
with the call that would tell it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hookline.context import LazyFloat, Metrics, State, StepContext
from hookline.errors import NotSuppliedError
from hookline.integrations.bare_loop.averages import Averages
from hookline.integrations.bare_loop.requirements import CALLS, supplied_by
from hookline.loop.event_context import EventContext, device_of

__all__ = ["BareLoopEventContext", "Batch"]


@dataclass
class Batch:
    """A batch that the loop draws through the session."""

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
        # What the loop may not tell is None here, and an error where a hook asks for it.
        self.known_config = config
        self.known_epoch: int | None = None
        self.known_batch: Batch | None = None
        self.known_tokens: int | None = None
        self.known_loss: Any = None
        self.why_no_loss = f". {CALLS['backward']}"
        self.latest_loss: LazyFloat | None = None
        self.averages = Averages()
        self.metrics = Metrics()

    # -- what the loop may or may not tell ---------------------------------------------------------

    @property
    def epoch(self) -> int:
        if self.known_epoch is None:
            raise supplied_by("epoch")
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
            raise supplied_by(name)
        return self.known_batch

    @property
    def config(self) -> Any:
        if self.known_config is None:
            raise supplied_by("config")
        return self.known_config

    @property
    def run(self) -> Any:
        raise supplied_by("run")

    @property
    def tokens_seen(self) -> int:
        if self.known_tokens is None:
            raise supplied_by("tokens_seen")
        return self.known_tokens

    @property
    def loss(self) -> Any:
        return self._tell_loss(self.known_loss)

    def _tell_loss(self, loss: Any) -> Any:
        if loss is None:
            raise NotSuppliedError(f"This loop has not told 'loss'{self.why_no_loss}")
        return loss

    # -- what is made when somebody asks ----------------------------------------------------------

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
        for key, tell in (
            ("current_epoch", lambda: self.epoch),
            ("current_batch_idx", lambda: self.batch_idx),
            ("latest_loss", lambda: self._tell_loss(self.latest_loss)),
            ("avg_loss", lambda: self._tell_loss(self.averages.mean("loss"))),
        ):
            try:
                known[key] = tell()
            except NotSuppliedError as error:
                absent[key] = str(error)
        return State(known, absent)
