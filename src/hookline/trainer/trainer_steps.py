"""The smaller parts of a trainer's loop: of an epoch, between two steps, and of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from hookline.context import Metrics
from hookline.errors import RunError, TrainingError
from hookline.trainer.checks import needs_metric
from hookline.trainer.losses import BatchPlace
from hookline.trainer.sharded_loader import end_together
from hookline.trainer.trainer_run import TrainerRun

__all__ = ["TrainerSteps"]


class TrainerSteps(TrainerRun):
    """The parts that the loop in `trainer` consists of."""

    # -- epochs -----------------------------------------------------------------------------------

    def _check_restartable(self, epochs: int | None) -> None:
        """Raise if several epochs are asked for and a loader has batches for one only."""
        validates = self.config.validate_every_epochs == 1
        for stream in (self.train_data, self.val_data if validates else None):
            if stream is not None and epochs is not None and epochs > 1:
                stream.check_restartable(epochs)

    def _end_together(
        self, batches: Iterator[Any], length: int | None
    ) -> tuple[Iterator[Any], int | None]:
        """Return batches that end in the same step in all processes, and their number."""
        processes, position = self.strategy.processes, self._position
        lengths = processes.gather(length)
        if None in lengths:
            self._epoch_length = None
            return end_together(batches, processes), None
        self._epoch_length = shortest = min(lengths)
        if shortest < max(lengths):
            self.announce(
                f"The processes have different numbers of batches in an epoch ({lengths}): it ends "
                f"after {shortest}."
            )
        return islice(batches, shortest - position.batches), shortest

    def _end_epoch(self, metrics: Metrics) -> None:
        for scheduler in self.schedulers:
            if needs_metric(scheduler):
                # hooks may have changed it in one process; not every epoch may be validated
                loss = self.strategy.processes.share(metrics.get("val/loss"))
                if loss is not None:
                    scheduler.step(loss)
            elif self.config.scheduler_every == "epoch":
                scheduler.step()
        self._position.end_epoch()

    # -- between two steps ------------------------------------------------------------------------

    def _boundary(self, *, validate: bool | None = None) -> bool:
        """Validate if it is due and apply requests, between two steps; return whether to stop.

        Args:
            validate: whether validation is due; None: as the configuration says.
        """
        every, context = self._validate_every, self._context
        if validate is None:
            validate = every is not None and not context.skipped and context.step % every == 0
        if validate and self.val_data is not None:
            self._validation_due = True  # in a checkpoint that is saved before it ends
            self._validate_in_loop()
            self._validation_due = False
        if self._prepares_saving:
            self._prepare_saving()
        if not self.strategy.alone and self._step_records.is_due(context.step):
            self._report_steps()
        return self._apply_requests()

    def _report_steps(self, *, is_last: bool = False) -> None:
        """Record the values of the steps, and at times the throughput and memory of each rank."""
        own = self._rank_metrics.measure(self._position.batches, is_last=is_last)
        at = self._context.step, self._context.epoch
        self._step_records.report(self._recorder.sink, own, at)

    def _apply_requests(self) -> bool:
        """Apply the requests of all ranks on all ranks; return whether to stop."""
        requests = self._requests
        if self.run is not None and self.run.lease_lost is not None:
            raise RunError(f"{self.run.lease_lost} Training ends here.")
        if self._saving is not None and self._saving.busy:
            self._saving.report()
        if (reason := self.strategy.stop_reason()) is not None:
            self.stop(reason)
        stop, save, signaled, toggled, saved = self.strategy.any_rank(
            requests.stop_reason is not None,
            bool(requests.checkpoints),
            requests.signal is not None,
            self._hooks_toggled,
            bool(self._saved),
        )
        if saved:
            self._share_saved()
        if toggled:
            self._agree_on_hooks()
        if stop:
            self.stop("another process asked for it")  # the first reason is kept
        stop = stop or self._context.step >= self._limit
        if signaled and not stop:  # training that stops here ends in any case
            self._leave()
        if save:
            self._save_requested()
        if self._probes is not None and self._probes.waiting:
            self._sync_probes(at_boundary=True)
        busy = self._saving is not None and self._saving.busy
        requests.settle(saving=busy or self._prepares_saving)
        return stop

    def _save_requested(self) -> None:
        self._save(self._requested_paths())

    # -- within a step ----------------------------------------------------------------------------

    def _step_size(self) -> int:
        """Return the number of batches in this step: the last step of an epoch may have fewer."""
        length = self._epoch_length
        if length is None:
            return self._accumulate
        first = self._position.batches - 1 - len(self._accumulated_losses)
        return min(self._accumulate, length - first)

    def _add_means(self, loss: Any, extra: Mapping[str, Any], loader: str) -> None:
        means = self._context.means
        for name, value in extra.items():
            means.add(f"train/{name}", value)
        if self._multi_loader:
            for name, value in {"loss": loss, **extra}.items():
                means.add(f"train/dl_{loader}/{name}", value)

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        context, config = self._context, self.config
        context.clipped_norm = self.strategy.clip(optimizer, config.clip_norm, config.clip_value)
        self._norms.append(context.clipped_norm)
        if self._dispatchers.on_gradient_clip is not None:
            self._dispatchers.on_gradient_clip(context)

    def _combine_norms(self) -> None:
        """Combine the norms of the optimizers' gradients into the norm of all gradients."""
        if len(self._norms) > 1:
            self._context.clipped_norm = torch.linalg.vector_norm(torch.stack(self._norms))
        self._norms.clear()

    def _skip_reason(self, idx: int) -> str:
        """Return why this optimizer does not step, on any rank; "" if it does."""
        reason = self._requests.why_skipped(idx)
        (skip,) = self.strategy.any_rank(bool(reason))
        return reason or ("another process asked" if skip else "")

    def _check_loss(self, loss: Any) -> TrainingError | None:
        """Skip the step of a loss that is not finite, or return the error to raise after it."""
        context = self._context
        place = BatchPlace(context.epoch, context.dataloader_name, context.batch_idx)
        problem = self._loss_check.check(loss, place)
        if isinstance(problem, TrainingError):
            return problem
        if problem:
            self.skip_optimizer_step(None, problem)
            self._drops_gradients = (
                True  # those that wait for their optimizer are not finite either
            )
        return None
