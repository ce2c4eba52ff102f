"""The trainer's loop, to be read from top to bottom.

    fit → _run_epochs → _run_epoch → _run_batches → _run_step → _end_step → _boundary
                      → validate                               _apply_requests

What the loop stands on is in `TrainerBase`, `TrainerState`, `TrainerSaving`, `TrainerValidation`,
`TrainerRun` (start and end) and `TrainerSteps` (smaller parts of the loop).

All values that hooks get are written into the context. Events are fired as

    if fire.on_step_end is not None: fire.on_step_end(context)

Whatever depends on where training runs goes through the strategy. Nothing here waits for the
device, except where a setting says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Never

from hookline.context import LazyFloat, Metrics
from hookline.errors import TrainingError
from hookline.loop.control_requests import ControlRequests
from hookline.loop.means import Means
from hookline.loop.signals import SignalWatch
from hookline.loop.training_loop import zero_grad
from hookline.trainer.checks import check_fit, check_gradient, check_metrics
from hookline.trainer.losses import mean_loss, mean_metrics
from hookline.trainer.sharded_loader import set_loader_epoch
from hookline.trainer.strategies import parameters_of
from hookline.trainer.trainer_base import Phase
from hookline.trainer.trainer_saving import Preempted
from hookline.trainer.trainer_steps import TrainerSteps

__all__ = ["Trainer"]


class Trainer(TrainerSteps):
    """Trains a model, and calls hooks while it does.

        trainer = Trainer(TrainerConfig(max_epochs=3), model, optimizer, loss_fn=loss_fn)
        trainer.add_hook(Watch())
        trainer.fit(loader, val_loaders=val_loader)

    Hooks get it as `trainer`, and may set attributes of their own on it.

    Args:
        config: a `TrainerConfig`, a mapping with its fields, or a `HooksConfig` alone.
        model: the model.
        optimizers: the optimizer, or several.
        schedulers: learning-rate schedulers, each for the optimizer it was made with.
        loss_fn: `loss_fn(outputs, targets)`; see `LossComputer` for the default.
        step_fn: `step_fn(model, batch)`, returns the loss or a mapping with `loss`.
        tokens_fn: returns the number of tokens in a batch; by default the size of its `input_ids`,
            or of integer inputs with two or more dimensions. None if batches have no tokens.
        hooks: hooks to register, in this order; or a configuration, as for `HookRegistry`.
        hparams: hyperparameters of the run; a mapping, or the result of `argparse`.
        name: a name for the run.
        tags: tags for the run.
        accelerator: the `Accelerator` of Hugging Face Accelerate to train with.
    """

    # -- the loop ---------------------------------------------------------------------------------

    def fit(
        self,
        loaders: Any = None,
        val_loaders: Any = None,
        *,
        resume_from: Any = None,
        fork_from: Any = None,
        per_sample_seed: bool = False,
        strict: bool = True,
        **unknown: Never,
    ) -> Trainer:
        """Train.

        A signal such as SIGTERM (see `CheckpointConfig.signals`) saves a checkpoint at the next
        step boundary or between two validation batches; `fit` then returns with the status
        `preempted`. Ctrl-C saves in the same way, and raises KeyboardInterrupt.

        Args:
            loaders: one loader, a list, or a mapping by name; see `TrainerConfig.loaders`.
            val_loaders: the same, for validation.
            resume_from: the folder or URL of a run or checkpoint to continue; "auto" for the newest
                unfinished run with the same configuration, or a new run if there is none.
            fork_from: the folder of a run or checkpoint from which a new run starts, with the
                settings of this trainer where they differ.
            per_sample_seed: seed the random numbers that a dataset uses for each sample, from the
                run's seed, the epoch and the sample's index: a resumed run then has the same
                augmentation also in workers.
            strict: raise if the checkpoint to resume from does not fit, after listing all
                differences; False loads what fits and lists the rest.
            unknown: any other argument raises an error that suggests the nearest one.
        """
        resume_from, fork_from = check_fit(
            unknown,
            resume_from,
            fork_from,
            inspect.signature(Trainer.fit).parameters,
            per_sample_seed=per_sample_seed,
            strict=strict,
        )
        self.set_data(loaders, val_loaders)
        if resume_from is None and fork_from is None:  # else there are metrics and ended epochs
            check_metrics(self)
            self._check_restartable(self.max_epochs)
        self._seeds_samples = per_sample_seed
        self._requests = ControlRequests()
        with SignalWatch(self._requests, self.config.checkpoints.signals):
            try:
                self._begin(resume_from, fork_from, strict=strict)
                if self._sanity_due and self.val_data is not None:
                    self._validate_in_loop()
                self._sanity_due = False
                self._run_epochs(self.max_epochs)
            except Preempted:
                self._context.status = "preempted"
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._end()
        self._check_late_signal()
        self._requeue()
        self._write_report()
        return self

    def train(self) -> Trainer:
        """Train on the data that the trainer was made with."""
        return self.fit()

    def _run_epochs(self, max_epochs: int | None) -> None:
        config, context, fire = self.config, self._context, self._dispatchers
        assert self.train_data is not None  # `fit` has set it
        # Within an epoch, a run that stops also ends the epoch, so that is where it looks.
        within_epoch = self._position.batches > 0 and not self._epoch_over
        stop = not within_epoch and self._apply_requests()
        if stop:  # also a resumed run in which EarlyStopping stops again
            context.epoch = self._last_epoch
        while not stop and (max_epochs is None or self._position.epoch < max_epochs):
            context.epoch = self._position.epoch
            self._epoch_over = False
            resumed = self._position.batches > 0  # within the epoch: it has means already
            if not resumed:
                context.means = Means()
                self._position.validated = {}
            if fire.on_epoch_start is not None:
                self._phase = Phase.IN_STEP  # checkpoints wait until all hooks were called
                with self._recorder.paused(resumed or self._epoch_started):  # recorded before
                    fire.on_epoch_start(context)
                self._phase = Phase.BETWEEN_STEPS
            self._epoch_started = True
            if not self.strategy.alone or self.accelerator is not None:
                set_loader_epoch(self.train_data.loaders, context.epoch)
            (save,) = self.strategy.any_rank(bool(self._requests.checkpoints))
            if save:
                self._save_requested()
            complete = self._run_epoch()
            self._phase = Phase.IN_STEP  # checkpoints that are requested now wait
            self._loss_check.finish()
            every = config.validate_every_epochs
            due = complete and every is not None and (context.epoch + 1) % every == 0
            if self.val_data is not None and due:
                self._validate_in_loop()
            if not self.strategy.alone:
                self._report_steps(is_last=True)
            means = self._means_of_all(context.means)
            context.made_metrics = Metrics(means | self._position.validated)
            if fire.on_epoch_end is not None:
                fire.on_epoch_end(context)
            self._recorder.epoch(context.step, context.epoch, means)
            self._epoch_over, self._epoch_started = True, False
            if complete:
                self._end_epoch(context.made_metrics)
            self._phase = Phase.BETWEEN_STEPS
            stop = self._apply_requests()

    def _run_epoch(self) -> bool:
        """Train on the batches of an epoch; return False if training stops before its end."""
        stream, position = self.train_data, self._position
        assert stream is not None  # `fit` has set it
        self._epoch_length = length = stream.length()
        batches = position.remaining_batches(stream, self.device)
        if not self.strategy.alone:
            batches, length = self._end_together(batches, length)
            self._rank_metrics.start_epoch(position.batches)
        self._progress.epoch(self._context.epoch, length, position.batches)
        if position.batches and self._boundary(validate=self._validation_due):
            return position.batches == length
        self._phases.wait_for_data()
        try:
            complete = self._run_batches(batches, length)
        except RuntimeError as error:
            if not self._ended_workers(error):
                raise
            self._leave(can_save=not self._accumulated_losses)
        if self._accumulated_losses:  # loaders without length ended within a step
            self._finish_step()
        if not position.batches:
            raise TrainingError("The loaders gave no batch, so there is nothing to train on.")
        return complete

    def _run_batches(
        self, batches: Iterable[tuple[Any, int, int, str]], length: int | None
    ) -> bool:
        """Train on batches and step when they complete a step; return False if training stops.

        What does not change in a run is read before the loop. Hooks may change at any time, so
        `fire` is read for each event, and `requests` has what hooks and users requested.
        """
        context, fire, requests = self._context, self._dispatchers, self._requests
        position, losses, limit = self._position, self._accumulated_losses, self._limit
        model, compute_loss, accumulate = self._called_model, self._loss_computer, self._accumulate
        strategy, autocasts, multi_loader = self.strategy, self._autocasts, self._multi_loader
        reads_at_once, count_tokens = self._reads_at_once, self._count_tokens
        processes, multi_rank = strategy.processes, not strategy.alone
        check_boundary = self._validate_every is not None or multi_rank or strategy.has_trigger
        mean_loss, phases = context.means.of("train/loss"), self._phases
        timed = phases.timed  # whether clocks are read in this batch
        advance = self._progress.advance if self._progress.shows else None
        self._phase = Phase.IN_STEP
        for batch, batch_idx, loader_idx, loader_name in batches:
            if timed:
                phases.begin_batch()
            position.batches += 1
            if multi_rank:
                processes.stage = 0
            context.batch, context.batch_idx = batch, batch_idx
            context.dataloader_idx, context.dataloader_name = loader_idx, loader_name
            context.made_metrics = None
            if fire.on_train_batch_start is not None:
                fire.on_train_batch_start(context)
            tokens = None if count_tokens is None else count_tokens(batch)
            if strategy.needs_transfer:
                batch = strategy.move(batch)

            # under accumulation, gradients are reduced by the backward that completes a step
            size = 1 if accumulate == 1 else self._step_size()
            complete = size == 1 or len(losses) + 1 >= size or position.batches == length
            if accumulate > 1:  # without a length, the epoch may end before the step is complete
                strategy.begin_batch(completes_step=complete, sync=complete or length is None)

            # forward and loss; on_before_forward and on_after_forward come from the model's call
            if multi_rank:
                processes.stage = 1
            if autocasts:
                with strategy.autocast():
                    loss, extra = compute_loss(model, batch)
            else:
                loss, extra = compute_loss(model, batch)
            if not loss.requires_grad:
                check_gradient(loss)
            batch_loss: Any = loss.item() if reads_at_once else loss.detach()

            # backward; under accumulation, the loss is divided by the step's number of batches
            if size > 1:
                loss = loss / size
            if fire.on_before_backward is not None:
                context.loss = loss
                fire.on_before_backward(context)
            if multi_rank:
                processes.stage = 2
            if timed:
                phases.lap("forward")
            strategy.backward(loss)
            if fire.on_after_backward is not None:
                fire.on_after_backward(context)
            if timed:
                phases.lap("backward")
            error = None
            if not reads_at_once or batch_loss - batch_loss != 0.0:  # not finite, or not known yet
                error = self._check_loss(batch_loss)

            # the step, when this batch completes one
            losses.append(batch_loss)
            if complete and error is None:
                self._run_step()
                if timed:
                    phases.lap("optimizer")

            # the end of the batch, and of the step
            context.latest_loss = batch_loss
            if tokens is not None:
                context.counted_tokens += tokens
            elif count_tokens is not None:
                context.tokens_unknown = True
            if reads_at_once:
                mean_loss.total += batch_loss
                mean_loss.weight += 1.0
            else:
                mean_loss.add(batch_loss)
            if extra or multi_loader:
                self._add_means(batch_loss, extra, loader_name)
                self._accumulated_metrics.append(extra)
            if fire.on_train_batch_end is not None:
                context.loss, context.extra = LazyFloat(batch_loss), dict(extra)
                fire.on_train_batch_end(context)
            if error is not None:
                raise error
            if complete:
                self._end_step()
            if advance is not None:
                advance(context.step, batch_loss)  # reads the loss only when it redraws
            if (
                complete
                and (check_boundary or requests.pending or context.step >= limit)
                and self._boundary()
            ):
                self._phase = Phase.BETWEEN_STEPS
                return position.batches == length
            if timed or phases.remaining <= 2:
                timed = phases.end_batch()
            else:
                phases.remaining -= 1
        self._phase = Phase.BETWEEN_STEPS
        return True

    def _run_step(self) -> None:
        """Step with every optimizer that is due."""
        context, fire, requests = self._context, self._dispatchers, self._requests
        strategy, schedulers = self.strategy, self._step_schedulers
        multi_rank = not strategy.alone
        if multi_rank and self._has_optimizer_schedule:  # gradients are those of all ranks
            (self._drops_gradients,) = strategy.any_rank(self._drops_gradients)
        if schedulers:
            context.keep_lr()  # schedulers change it before hooks read it
        if self._has_optimizer_schedule:  # the gradients of those that are not due accumulate
            self._optimizer_round += 1
            self._due_optimizers = [
                (idx, optimizer)
                for idx, optimizer in enumerate(self.optimizers)
                if self._optimizer_round % self._optimizer_every[idx] == 0
            ]
        context.skipped = True
        for idx, optimizer in self._due_optimizers:
            context.optimizer_idx = idx
            if self._autocasts:
                strategy.unscale(optimizer)
            if fire.on_gradients_ready is not None:
                fire.on_gradients_ready(context)
            if fire.update is not None:
                fire.update(context)
                context.made_gradients = None  # frees them
            if self._clips:
                self._clip(optimizer)
            if fire.on_before_optimizer_step is not None:
                fire.on_before_optimizer_step(context)
            reason = self._skip_reason(idx) if multi_rank or requests.pending else ""
            if not reason and not strategy.step(optimizer):
                reason = "the scaler found non-finite gradients"
            if reason:
                context.reason = reason
                self._recorder.step_skipped(context.step, reason, idx)
                if fire.on_step_skipped is not None:
                    fire.on_step_skipped(context)
                continue
            context.skipped = False
            if fire.on_after_optimizer_step is not None:
                fire.on_after_optimizer_step(context)
            if schedulers:
                for scheduler in schedulers[idx]:
                    scheduler.step()
        if self._autocasts:
            due = [optimizer for _, optimizer in self._due_optimizers]
            strategy.end_step(o for o in self.optimizers if o not in due)
        if self._clips:
            self._combine_norms()
        if multi_rank or requests.pending:
            requests.skips.clear()
        if not context.skipped:
            context.step += 1

    def _end_step(self) -> None:
        """Fire on_step_end, record the loss, and zero the gradients that were used."""
        context, fire, losses = self._context, self._dispatchers, self._accumulated_losses
        run = self._recorder.sink
        loss = losses[0] if len(losses) == 1 else mean_loss(losses)
        if context.norm_agreement is not None:
            context.prepare_norm(context.epoch)
        if fire.on_step_end is not None:
            context.loss = LazyFloat(loss)
            fire.on_step_end(context)
        alone = self.strategy.alone
        record = self._step_records.add if not alone else None if run is None else run.log
        if record is not None:
            record(context.step, context.epoch, "train/loss", loss)
            for name, value in mean_metrics(self._accumulated_metrics).items():
                record(context.step, context.epoch, f"train/{name}", value)
        used = self.optimizers if self._drops_gradients else [o for _, o in self._due_optimizers]
        for optimizer in used:
            zero_grad(optimizer)
        self._drops_gradients = False
        if self._probes is not None:
            self._probes.end_step()
        if self._monitor is not None and self._monitor.sampler.sample is not None:
            self._monitor.record(context.step, context.epoch)
        losses.clear()
        self._accumulated_metrics.clear()
        context.clipped_norm = context.agreed_norm = None
        context.step_in_progress = context.step + 1

    # -- a loop of the user's own -----------------------------------------------------------------

    def training_step(self, batch: Any, *, lazy: bool = False) -> float | LazyFloat:
        """Train on one batch, and step when it completes a step; return the batch's loss.

        For users who write the loop themselves. The first call starts the run; `finish()` ends it.

        Args:
            batch: the batch.
            lazy: return a `LazyFloat`, which waits for the device when it is read. By default the
                loss is a `float`, and this waits.
        """
        try:
            if self._phase is Phase.IDLE:
                self._requests = ControlRequests()
                self._begin(None)
                self._epoch_length = None
                if self._dispatchers.on_epoch_start is not None:
                    self._dispatchers.on_epoch_start(self._context)
            self._run_batches([(batch, self._position.batches, 0, "train")], None)
            loss = self._context.latest_loss
            return LazyFloat(loss) if lazy else float(loss)
        except BaseException as error:
            self._fail(error)
            self._end()
            raise

    def finish(self, status: str = "completed") -> None:
        """End a run that was driven by `training_step`: finish its last step, end the epoch."""
        if self._phase is Phase.IDLE:
            return
        context = self._context
        try:
            if self._accumulated_losses:
                self._finish_step()
            self._loss_check.finish()
            context.made_metrics = Metrics(context.means.means())
            if self._dispatchers.on_epoch_end is not None:
                self._dispatchers.on_epoch_end(context)
            context.status = status
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._end()
        self._write_report()

    def _finish_step(self) -> None:
        """Step with the batches that are there, as if the step had been that small."""
        factor = self._accumulate / len(self._accumulated_losses)
        for optimizer, every in zip(self.optimizers, self._optimizer_every, strict=True):
            for parameter in parameters_of(optimizer) if every == 1 else ():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self._phase = Phase.IN_STEP
        self.strategy.begin_batch(completes_step=True, sync=True)
        self._run_step()
        self._end_step()
        self._boundary()
        self._phase = Phase.BETWEEN_STEPS
