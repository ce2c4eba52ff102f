"""Where a bare loop stands: the arguments of its events, as attributes.

The session writes it, dispatchers read it. What this loop has not told raises `NotSuppliedError`
with the call that would tell it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch

from hookline.context import LazyFloat, Metrics, State, StepContext
from hookline.errors import NotSuppliedError
from hookline.hosts.raw.averages import Averages
from hookline.hosts.raw.needs import CALLS, supplied_by

__all__ = ["Batch", "Moment"]


@dataclass
class Batch:
    """A batch that the loop draws through the session."""

    batch: Any
    index: int
    loader_idx: int
    loader_name: str
    logged: dict[str, Any] = field(default_factory=dict)
    ended: bool = False


class Moment:
    """The arguments of events in a bare loop."""

    def __init__(
        self,
        trainer: Any,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        config: Any,
    ) -> None:
        self.trainer = trainer
        self.model = model
        self.optimizers = optimizers
        self.optimizer = optimizers[0]
        self.status = "training"
        self.step = 0
        self.step_in_progress = 1
        self.optimizer_idx = 0
        self.outputs: Any = None
        self.reason = ""
        self.exception: BaseException | None = None
        self.checkpoint_path: Any = None
        self.metrics = Metrics()
        self.skipped = False
        # What the loop may not tell is None here, and an error where a hook asks for it.
        self.known_config = config
        self.known_epoch: int | None = None
        self.known_batch: Batch | None = None
        self.known_tokens: int | None = None
        self.known_loss: Any = None
        self.why_no_loss = f". {CALLS['backward']}"
        self.latest_loss: LazyFloat | None = None
        self.averages = Averages()
        self.clipped_norm: torch.Tensor | None = None

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
    def lr(self) -> float | LazyFloat:
        lr = self.optimizer.param_groups[0]["lr"]
        return LazyFloat(lr) if isinstance(lr, torch.Tensor) else lr

    @property
    def grad_norm(self) -> LazyFloat:
        return LazyFloat(self._norm())

    def _norm(self) -> torch.Tensor:
        if self.clipped_norm is not None:
            return self.clipped_norm
        norm = torch.nn.utils.get_total_norm(self._gradients())
        # Of sharded gradients each rank has a part; its own number would be silently wrong.
        return cast(Any, norm).full_tensor() if _is_sharded(norm) else norm

    def _gradients(self) -> list[torch.Tensor]:
        return [
            parameter.grad
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    @property
    def ctx(self) -> StepContext:
        return StepContext(
            step=self.step,
            loss=self._later("loss") if self.known_loss is None else self.known_loss,
            grad_norm=self._norm_of_this_step(),
            lr=self.lr,  # type: ignore[arg-type]
            tokens_seen=self._later("tokens_seen")
            if self.known_tokens is None
            else self.known_tokens,
            model=self.model,
            optimizer=self.optimizer,
            skipped=self.skipped,
        )

    def _later(self, name: str) -> Any:
        return lambda: getattr(self, name)

    def _norm_of_this_step(self) -> Any:
        """The norm, computed if somebody looks while the gradients are still there."""
        step = self.step_in_progress
        if any(_is_sharded(gradient) for gradient in self._gradients()):
            return self._norm()  # now, on all ranks: one that looked alone would wait for ever

        def norm() -> float:
            if self.step_in_progress != step:
                raise NotSuppliedError(
                    "ctx.grad_norm is computed when looked at, and the gradients of its step are "
                    "gone. Look at it in on_step_end, or ask for `grad_norm` by name."
                )
            return float(self._norm())

        return norm

    @property
    def state(self) -> State:
        known: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "device": next((p.device for p in self.model.parameters()), torch.device("cpu")),
            "model_params": self._model_params,
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

    @cached_property
    def _model_params(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor. Importing them takes half a second: who has one has done so."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
