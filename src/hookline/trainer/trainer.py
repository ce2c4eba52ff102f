"""The trainer's loop, to be read from top to bottom.

    fit → _run_epochs → _run_epoch → _run_batches → _run_step → _end_step → _boundary
                      → validate                               _apply_requests

All values that hooks get are written into the context. Events are fired as

    if fire.on_step_end is not None: fire.on_step_end(context)

Whatever depends on where training runs goes through the strategy. Nothing here waits for the
device, except where a setting says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Never

import torch

from hookline.arguments import check_flag, check_instance, check_path, show_value
from hookline.config.trainer_config import HooksConfig, TrainerConfig
from hookline.context import LazyFloat, Metrics
from hookline.errors import ArgumentError, RunError, TrainingError, nearest
from hookline.loop.control_requests import ControlRequests
from hookline.loop.means import Means
from hookline.loop.random_state import generator_state, generators_of
from hookline.loop.signals import SignalWatch
from hookline.loop.training_loop import zero_grad
from hookline.trainer.checks import check_gradient, check_metrics, needs_metric
from hookline.trainer.losses import BatchPlace
from hookline.trainer.sharded_loader import end_together, set_loader_epoch
from hookline.trainer.strategies import parameters_of
from hookline.trainer.trainer_base import Phase
from hookline.trainer.trainer_run import Preempted, TrainerRun

__all__ = ["Trainer", "get_trainer"]


class Trainer(TrainerRun):
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
        for name in unknown:
            hint = nearest(name, inspect.signature(Trainer.fit).parameters)
            if name.startswith("train"):
                hint = " The training data comes first: fit(loader, val_loaders=…)."
            raise ArgumentError(f"fit() has no argument '{name}'.{hint}")
        if resume_from is not None and fork_from is not None:
            raise ArgumentError(
                "fit() got both resume_from, which continues a run, and fork_from, which starts a "
                "new one. Give one of them."
            )
        check_flag("fit(…, per_sample_seed=…)", per_sample_seed)
        check_flag("fit(…, strict=…)", strict)
        if resume_from is not None:
            resume_from = check_path("fit(…, resume_from=…)", resume_from, "a run or a checkpoint")
        if fork_from is not None:
            fork_from = check_path("fit(…, fork_from=…)", fork_from, "a run or a checkpoint")
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

    def _check_restartable(self, epochs: int | None) -> None:
        """Raise if several epochs are asked for and a loader has batches for one only."""
        validates = self.config.validate_every_epochs == 1
        for stream in (self.train_data, self.val_data if validates else None):
            if stream is not None and epochs is not None and epochs > 1:
                stream.check_restartable(epochs)

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
        loss = losses[0] if len(losses) == 1 else _mean(losses)
        if context.norm_agreement is not None:
            context.prepare_norm(context.epoch)
        if fire.on_step_end is not None:
            context.loss = LazyFloat(loss)
            fire.on_step_end(context)
        alone = self.strategy.alone
        record = self._step_records.add if not alone else None if run is None else run.log
        if record is not None:
            record(context.step, context.epoch, "train/loss", loss)
            for name, value in _mean_metrics(self._accumulated_metrics).items():
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

    def _validate_in_loop(self) -> None:
        """Validate, unless a signal ends it: then save the state from before it, and leave."""
        assert self.val_data is not None
        if not self.strategy.alone:
            self._step_records.report(self._recorder.sink)  # before the values of the validation
        state = self._state_before_validation()
        generators = [(g, generator_state(g)) for g in generators_of(self.val_data.loaders)]
        phase, self._phase = self._phase, Phase.IN_STEP  # checkpoints wait for its end
        try:
            metrics = self._validate(self.val_data, until_signal=True)
        except RuntimeError as error:
            if not self._ended_workers(error):
                raise
            metrics = None
        self._phase = phase
        if metrics is None:
            self._cancel_validation(state, generators)
            self._leave()

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

    # -- small parts of the loop ------------------------------------------------------------------

    def _step_size(self) -> int:
        """Return the number of batches in this step: the last step of an epoch may have fewer."""
        length = self._epoch_length
        if length is None:
            return self._accumulate
        first = self._position.batches - 1 - len(self._accumulated_losses)
        return min(self._accumulate, length - first)

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


def _mean(losses: list[Any]) -> Any:
    """Return the mean of a step's losses, on their device."""
    if isinstance(losses[0], torch.Tensor):
        return torch.stack([loss.float() for loss in losses]).mean()
    return sum(losses) / len(losses)


def _mean_metrics(batches: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means of a step's metrics, over the batches that have them."""
    if len(batches) == 1:
        return dict(batches[0])
    values: dict[str, list[Any]] = {}
    for metrics in batches:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: _mean(several) for name, several in values.items()}


def get_trainer(
    kind: str,
    model: torch.nn.Module,
    dataloader: Any,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    device: Any = None,
    **options: Any,
) -> Trainer:
    """Return a trainer with its data: `get_trainer("simple", model, loader, optimizer)`.

    `options` are the fields of `TrainerConfig`, `val_loaders`, and the arguments of `Trainer`.
    "ddp" and "fsdp" are for scripts that `torchrun` starts in several processes, "accelerate" is
    for Hugging Face Accelerate.
    """
    if not isinstance(kind, str) or kind not in ("simple", "ddp", "fsdp", "accelerate"):
        known = "'simple', 'ddp', 'fsdp' and 'accelerate'"
        raise TrainingError(f"Unknown trainer {show_value(kind)}. There are {known}.")
    if device is not None:
        check_instance("get_trainer(…, device=…)", device, str | torch.device, "a device or None")
    if kind != "simple":
        options = {"strategy": kind, **options}
    parts = ["loss_fn", "step_fn", "tokens_fn", "schedulers", "hparams", "name", "tags"]
    parts.append("accelerator")
    hooks = options.get("hooks", {})
    is_config = isinstance(hooks, Mapping) and set(hooks) <= set(HooksConfig.model_fields)
    if not is_config and not isinstance(hooks, HooksConfig):
        parts.append("hooks")  # hooks themselves, a registry, or its configuration
    given = {name: options.pop(name) for name in parts if name in options}
    val_loaders = options.pop("val_loaders", None)
    config = TrainerConfig(device=None if device is None else str(device), **options)
    make: type[Trainer] = Trainer
    if kind == "accelerate":
        from hookline.trainer.accelerate_trainer import AccelerateTrainer

        make = AccelerateTrainer
    trainer = make(config, model, optimizer, **given)
    trainer.set_data(dataloader, val_loaders)
    return trainer
