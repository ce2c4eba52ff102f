"""Batches, epochs and validations of a loop that is not ours, as it tells of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookline.context import Metrics
from hookline.integrations.bare_loop.loop_checks import CALLS, Requirements
from hookline.integrations.bare_loop.step_watch import StepWatch
from hookline.loop.means import Means
from hookline.loop.state import StateItem, adapt_means, adapt_tokens

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.session import Session


_OF_BATCH = ("batch", "batch_idx", "dataloader_idx", "dataloader_name")


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


class LoopPhases:
    """Begins and ends batches, epochs and validations, and fires their events.

    Args:
        session: fires events.
        requirements: what the loop provides.
        count_tokens: returns the tokens of a batch; None if batches have none.

    Attributes:
        session: fires events.
        counts_tokens: whether tokens are counted.
        watch: watches model and optimizers; it ends the batches that complete a step.
        batch: the batch in progress, or the last one; None if the loop does not tell of batches.
        validation: the means of the validation in progress; None outside of one.
        resumed_epoch: the epoch that was in progress when a checkpoint was saved.
        epoch_is_over: whether no epoch has begun since the last one.
        other_metrics: returns further metrics of a training batch that ends.
    """

    def __init__(
        self,
        session: Session,
        requirements: Requirements,
        count_tokens: Callable[[Any], int | None] | None,
    ) -> None:
        self.session, self._loop = session, session.loop
        self._requirements, self._count_tokens = requirements, count_tokens
        self.counts_tokens = count_tokens is not None
        self.watch: StepWatch
        self.batch: Batch | None = None
        self.validation: Means | None = None
        self._validation_began = 0.0
        self.resumed_epoch: int | None = None
        self.epoch_is_over = False
        self.other_metrics: Callable[[], Mapping[str, Any]] | None = None

    def state_items(self) -> list[StateItem]:
        """Return what a checkpoint has of the epoch in progress."""
        context = self._loop.context

        def save_means() -> Any:
            return {} if self.epoch_is_over else context.means.state_dict()

        def load_means(state: Any) -> None:
            context.means.load_state_dict(state)

        def load_tokens(tokens: int | None) -> None:
            if tokens is not None:
                context.tokens_seen = tokens
                self._requirements.provided.add("tokens")

        def save_epoch() -> int | None:
            epoch: int | None = context.known("epoch")
            return epoch + 1 if epoch is not None and self.epoch_is_over else epoch

        def load_epoch(epoch: int | None) -> None:
            context.provide("epoch", epoch - 1 if epoch else None)
            self.resumed_epoch = epoch

        return [
            StateItem("means", save_means, load_means, adapt_means),
            StateItem(
                "tokens_seen", lambda: context.known("tokens_seen"), load_tokens, adapt_tokens
            ),
            StateItem("epoch", save_epoch, load_epoch),
        ]

    # -- batches ----------------------------------------------------------------------------------

    def set_batch(self, batch: Batch | None) -> None:
        """Set the batch in progress; None if the loop does not tell of one."""
        context = self._loop.context
        if batch is not None:
            self.watch.losses.of_batch = None if batch.ended else []
            context.batch, context.batch_idx = batch.batch, batch.index
            context.dataloader_idx, context.dataloader_name = batch.loader_idx, batch.loader_name
        elif self.batch is not None:
            self.watch.losses.of_batch = None
            for name in _OF_BATCH:
                context.provide(name, None)
        self.batch = batch

    def begin_batch(self, batch: Batch, *, waited: float | None = None) -> None:
        """Begin a batch, of training or validation; `waited` are the seconds that loading took."""
        watch, trains = self.watch, self.validation is None
        if trains and watch.times.timed:
            watch.times.begin_batch(waited)
        self.set_batch(batch)
        if self._count_tokens is not None and (n := self._count_tokens(batch.batch)) is not None:
            batch.tokens = n
            self._requirements.provided.add("tokens")
        if not trains:
            self.session.fire("on_validation_batch_start")
        elif watch.dispatchers.on_train_batch_start is not None:
            self.session.fire("on_train_batch_start")

    def end_batch(self) -> None:
        """End the batch in progress, if there is one."""
        context, watch, batch = self._loop.context, self.watch, self.batch
        if batch is None or batch.ended:
            return
        batch.ended = True
        if watch.times.timed:
            watch.times.end_micro_batch()
        if self.validation is not None:
            context.event_metrics = Metrics(batch.logged)
            context.provide("loss", batch.logged.get("loss"))
            self._requirements.why_no_loss = f". {CALLS['log']}"
            self.session.fire("on_validation_batch_end")
            return
        if batch.tokens is not None:
            self.add_tokens(batch.tokens)
        if watch.dispatchers.on_train_batch_end is not None:
            loss = watch.batch_loss() if watch.losses.wanted else None
            known = {} if loss is None else {"loss": loss}
            others = self.other_metrics if watch.needs.batch_metrics else None
            more = {} if others is None else others()
            context.event_metrics = Metrics({**known, **batch.logged, **more})
            self.session.fire("on_train_batch_end")
        watch.losses.of_batch = None

    def add_tokens(self, tokens: int) -> None:
        """Count tokens that are trained on."""
        self._loop.context.tokens_seen = (self._loop.context.known("tokens_seen") or 0) + tokens
        self._requirements.provided.add("tokens")

    # -- epochs -----------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch; one that was interrupted has means already."""
        context = self._loop.context
        context.epoch = epoch
        if self.resumed_epoch != epoch:
            context.means, context.validated = Means(), {}
        self.resumed_epoch, self.epoch_is_over = None, False
        self.session.fire("on_epoch_start")
        self.watch.times.wait_for_data()

    def end_epoch(self) -> None:
        """End the epoch, with the means over all ranks."""
        self.epoch_is_over = True
        loop = self._loop
        if loop.ranks.is_distributed:
            loop.ranks.records.report(loop.record.sink)
        loop.end_epoch(loop.ranks.means(loop.context.means), self.session.fire)

    # -- validations ------------------------------------------------------------------------------

    def begin_validation(self) -> Means:
        """Begin a validation; return what its values are added to."""
        self.validation = means = Means()
        self._validation_began = self.watch.times.begin_span()
        self._loop.context.evaluating = True
        return means

    def end_validation(self, values: Mapping[str, Any]) -> None:
        """Give hooks the metrics of a validation, and record them."""
        self._loop.end_validation(values, self.session.fire)

    def leave_validation(self) -> None:
        """Leave a validation, also one that has failed."""
        if self.validation is not None:
            self.watch.times.end_span("validation", self._validation_began)
        self.validation = None
        self._loop.context.evaluating = False
