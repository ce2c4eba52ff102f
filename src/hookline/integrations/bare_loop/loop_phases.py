"""Begin and end of batches, epochs and validations, as the loop or its host tells of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.context import Metrics
from hookline.integrations.bare_loop.attached_loop import AttachedLoop
from hookline.integrations.bare_loop.bare_loop_context import Batch
from hookline.loop.means import Means

__all__ = ["LoopPhases"]


class LoopPhases(AttachedLoop):
    """A loop that is told when batches, epochs and validations begin and end."""

    _validation_began = 0.0

    def _begin_batch(self, batch: Batch) -> None:
        """Begin a batch, of training or validation."""
        watch, trains = self._step_watch, self._validation is None
        if trains and watch.phases.timed:
            watch.phases.begin_batch()
        self._context.known_batch = batch
        watch.losses.batch_begins()
        if self._tokens_fn is not None and (tokens := self._tokens_fn(batch.batch)) is not None:
            batch.tokens = tokens
            self._supplied.add("tokens")
        fire = self.hooks.dispatchers
        if not trains:
            self._fire("on_validation_batch_start")
        elif fire.on_train_batch_start is not None:
            self._fire("on_train_batch_start")

    def _begin_epoch(self, epoch: int) -> None:
        self._context.known_epoch = epoch
        if self._resumed_epoch != epoch:  # else it was interrupted, and has means already
            self._context.means = Means()
            self._validated = {}
        self._resumed_epoch, self._epoch_is_over = None, False
        self._fire("on_epoch_start")
        self._step_watch.phases.wait_for_data()

    def _end_epoch(self) -> None:
        self._epoch_is_over = True
        own, agreement = self._context.means, self._agreement
        means = own.means() if agreement is None else agreement.epoch_means(own, self.run)
        self._context.metrics = Metrics(means | self._validated)
        self._fire("on_epoch_end")
        self._agree()
        if self._recorder is not None:
            self._recorder.epoch(self._context.step, self._context.known_epoch, means)

    def _begin_validation(self) -> Means:
        self._validation = means = Means()
        self._validation_began = self._step_watch.phases.begin_span()
        self._context.evaluating = True
        return means

    def _end_validation(self, values: Mapping[str, Any]) -> None:
        """Give hooks the metrics of a validation, and record them."""
        self._context.metrics = metrics = Metrics(values)
        self._fire("on_validation_end")
        self._validated = dict.copy(metrics)
        if self._recorder is not None:
            self._recorder.metrics(self._context.step, self._context.known_epoch, metrics)
        if "val/accuracy" in metrics:
            self.best_accuracy = max(self.best_accuracy, float(metrics["val/accuracy"]))

    def _leave_validation(self) -> None:
        if self._validation is not None:
            self._step_watch.phases.end_span("validation", self._validation_began)
        self._validation = None
        self._context.evaluating = False
