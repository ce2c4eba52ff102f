"""The event context of a bare loop.

The session writes it, dispatchers read it. What the loop has not provided raises `NotSuppliedError`
with the call that would provide it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from hookline.context import LazyFloat, Metrics, NotProvided, State, StepContext
from hookline.errors import NotSuppliedError
from hookline.integrations.bare_loop.requirements import CALLS, not_supplied
from hookline.loop.event_context import EventContext, device_of, gradients_of
from hookline.loop.means import Means
from hookline.loop.model_watch import CalledModules
from hookline.tensors.global_norm import global_norm

__all__ = ["BareLoopEventContext", "Batch", "ProbeContext"]


@dataclass(slots=True)
class Batch:
    """A batch that the loop loads through the session."""

    batch: Any
    index: int
    loader_idx: int
    loader_name: str
    tokens: int | None = None
    logged: dict[str, Any] = field(default_factory=dict)
    ended: bool = False


def _provided(argument: str, known: str, part: str | None = None) -> property:
    """Return a property that raises until the loop has provided its value."""

    def read(context: BareLoopEventContext) -> Any:
        value = getattr(context, known)
        if value is None:
            raise not_supplied(argument, context.calls)
        return value if part is None else getattr(value, part)

    return property(read)


class BareLoopEventContext(EventContext):
    """The arguments of events in a bare loop."""

    def __init__(
        self,
        trainer: Any,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        config: Any,
        has_run: bool,
    ) -> None:
        super().__init__(trainer, model, optimizers)
        self.has_run = has_run
        self.calls = CALLS  # what the loop can do about what it does not provide
        self.called = CalledModules()  # where a host calls something else than the model
        self.generating = False  # the model generates, which is not a training forward
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
        self.norms: dict[int, torch.Tensor] = {}  # before clipping, by optimizer

    # -- what the loop may not provide -----------------------------------------------------------

    epoch = _provided("epoch", "known_epoch")
    config = _provided("config", "known_config")
    tokens_seen = _provided("tokens_seen", "known_tokens")
    batch = _provided("batch", "known_batch", "batch")
    batch_idx = _provided("batch_idx", "known_batch", "index")
    dataloader_idx = _provided("dataloader_idx", "known_batch", "loader_idx")
    dataloader_name = _provided("dataloader_name", "known_batch", "loader_name")

    @property
    def run(self) -> Any:
        if not self.has_run:
            raise not_supplied("run", self.calls)
        return self.trainer.run  # None on ranks other than the first

    @property
    def loss(self) -> Any:
        return self._required_loss(self.known_loss)

    def _required_loss(self, loss: Any) -> Any:
        if loss is None:
            raise NotSuppliedError(f"This loop has not provided 'loss'{self.why_no_loss}")
        return loss

    # -- what is made when it is read -------------------------------------------------------------

    def compute_norm(self) -> torch.Tensor:
        """Compute the norm of all gradients before clipping, on the device."""
        if not self.norms:
            return super().compute_norm()
        norms = [
            self.norms[i] if i in self.norms else global_norm(gradients_of(optimizer))
            for i, optimizer in enumerate(self.optimizers)
        ]
        return norms[0] if len(norms) == 1 else global_norm(norms)

    @property
    def ctx(self) -> StepContext:
        return StepContext(
            step=self.step,
            loss=self._field("loss"),
            grad_norm=self.grad_norm,
            lr=self.lr,
            tokens_seen=self._field("tokens_seen"),
            model=self.model,
            optimizer=self.optimizer,
            skipped=self.skipped,
        )

    def _field(self, name: str) -> Any:
        """Return a field of `ctx`; without a value, one whose access raises the error."""
        try:
            return getattr(self, name)
        except NotSuppliedError as error:
            return NotProvided(str(error))

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
        readers: dict[str, Callable[[], Any]] = {
            "current_epoch": lambda: self.epoch,
            "current_batch_idx": lambda: self.batch_idx,
            "latest_loss": lambda: self._required_loss(self.latest_loss),
            "avg_loss": lambda: self._required_loss(self.means.mean("train/loss")),
        }
        for key, read in readers.items():
            try:
                known[key] = read()
            except NotSuppliedError as error:
                absent[key] = str(error)
        return State(known, absent)


class ProbeContext:
    """The context as probes read it: what the loop has not provided is None."""

    def __init__(self, context: BareLoopEventContext) -> None:
        self._context = context

    trainer = property(attrgetter("_context.trainer"))
    step = property(attrgetter("_context.step"))
    step_in_progress = property(attrgetter("_context.step_in_progress"))
    epoch = property(attrgetter("_context.known_epoch"))

    shows_generation = property(attrgetter("_context.shows_generation"))

    @property
    def evaluating(self) -> bool:
        context = self._context
        return context.evaluating or (context.generating and not context.shows_generation)
