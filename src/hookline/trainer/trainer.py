"""The trainer: one loop, to be read from top to bottom.

    fit → _run_epochs → _run_epoch → _run_batches → _run_step → _boundary → _apply_requests
                      → validate

Everything that hooks get is written into the context; events are fired as

    if fire.on_step_end is not None: fire.on_step_end(context)

Whatever depends on where training runs goes through the strategy. Nothing here waits for the
device, except where a setting says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from hookline.config import HookRegistry, make_hook
from hookline.config.trainer_config import HooksConfig, TrainerConfig
from hookline.context import LazyFloat, Metrics
from hookline.dispatch import HooksMixin
from hookline.errors import HooklineError, RunError, TrainingError, listed
from hookline.hook import Hook
from hookline.loop.control_requests import ControlRequests
from hookline.loop.evaluation import evaluation, samples_in, tokens_in
from hookline.loop.means import Means
from hookline.loop.model_watch import ModelWatch
from hookline.loop.random_state import seed_everything
from hookline.loop.zero_grad import zero_grad
from hookline.runs.run import Kind
from hookline.tensors.observation import Observation
from hookline.trainer.checks import (
    checked_model,
    checked_optimizers,
    device_for,
    match_schedulers,
)
from hookline.trainer.data_position import DataPosition
from hookline.trainer.data_stream import LoadedBatch, MixConfig, Stream
from hookline.trainer.loss_computer import LossComputer
from hookline.trainer.nan_check import DeferredNanCheck
from hookline.trainer.progress import make_progress
from hookline.trainer.run_log import RunLog
from hookline.trainer.strategies import SingleProcess
from hookline.trainer.trainer_checkpoint import load_trainer_checkpoint, save_trainer_checkpoint
from hookline.trainer.trainer_context import TrainerEventContext
from hookline.updates import Identity

if TYPE_CHECKING:
    from hookline.probes.sync import ProbeSync

__all__ = ["Trainer", "get_trainer"]

log = logging.getLogger("hookline")


class Trainer(HooksMixin[HookRegistry]):
    """Trains a model, and calls hooks while it does.

        trainer = Trainer(TrainerConfig(max_epochs=3), model, optimizer, loss_fn=loss_fn)
        trainer.add_hook(Watch())
        trainer.fit(loader, val_loaders=val_loader)

    Hooks get it as `trainer`, and may put attributes of their own on it.

    Args:
        config: a `TrainerConfig`, a mapping with its fields, or a `HooksConfig` alone.
        model: the model.
        optimizers: the optimizer, or several.
        schedulers: learning-rate schedulers, each for the optimizer it was made with.
        loss_fn: `loss_fn(outputs, targets)`; see `LossComputer` for what happens without.
        step_fn: `step_fn(model, batch)`, returns the loss or a mapping with `loss`.
        tokens_fn: how many tokens a batch has; by default the size of its `input_ids`.
        hooks: hooks to register, in this order; or a configuration, as for `HookRegistry`.
    """

    def __init__(
        self,
        config: TrainerConfig | HooksConfig | Mapping[str, Any] | None,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        schedulers: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        step_fn: Callable[..., Any] | None = None,
        tokens_fn: Callable[[Any], int] | None = None,
        hooks: Iterable[Hook] | Mapping[str, Any] = (),
    ) -> None:
        if isinstance(config, HooksConfig):
            config = TrainerConfig(hooks=config)
        if isinstance(config, Mapping):
            config = TrainerConfig(**config)
        if config is not None and not isinstance(config, TrainerConfig):
            raise TypeError(
                "A trainer's config is a TrainerConfig, a HooksConfig, or a mapping with the "
                f"fields of a TrainerConfig, not {config!r}, a {type(config).__name__}."
            )
        self.config = config if config is not None else TrainerConfig()
        self.device = device_for(self.config.device, checked_model(model))
        self.strategy = SingleProcess(self.device, self.config.precision)
        self.model, self.optimizers = self.strategy.prepare(
            model, checked_optimizers(optimizers, model, self.config.optimizer_every)
        )
        self.schedulers = match_schedulers(schedulers, self.optimizers)
        self.best_accuracy = 0.0
        self._compute_loss = LossComputer(step_fn, loss_fn)
        self._tokens_fn = tokens_fn
        self._tokens = tokens_fn or tokens_in
        self._context = TrainerEventContext(self, self.model, self.optimizers, self.config)
        self._watch = ModelWatch(
            self.model, self._before_forward, self._after_forward, _nothing, _nothing
        )
        configured, given = (hooks, ()) if isinstance(hooks, Mapping) else (None, hooks)
        self.hooks = HookRegistry(self.config.hooks, hooks=given, source=self._context)
        self.hooks.add_configured(configured)
        if "identity" not in self.hooks:
            self.hooks.add_hook(Identity())
        self._dispatchers = self.hooks.dispatchers
        self._running = False
        self._in_between = True
        self._requests = ControlRequests()
        self._probes: ProbeSync | None = None
        self._run_log = RunLog(None)
        self.hooks.on_change = self._hooks_changed
        self._hooks_changed()
        self._progress = make_progress("off")
        self._nan = DeferredNanCheck()
        self._train: Stream | None = None
        self._val: Stream | None = None
        self._position = DataPosition()
        self._read_config()
        self._accumulated_losses: list[Any] = []  # losses of the batches that make the next step
        self._norms: list[torch.Tensor] = []  # of the optimizers' gradients in this step
        self._by_hand = False
        self._round = 0
        self._running = self._started = False

    # -- the loop ---------------------------------------------------------------------------------

    def fit(
        self, loaders: Any = None, val_loaders: Any = None, *, resume_from: Any = None
    ) -> Trainer:
        """Train.

        Args:
            loaders: one loader, a list, or a mapping by name; see `TrainerConfig.loaders`.
            val_loaders: the same, for validation.
            resume_from: a checkpoint, or a run: go on from there.
        """
        self._take_data(loaders, val_loaders)
        try:
            self._begin(resume_from)
            if self.config.sanity and self._val is not None:
                self.validate()
            self._run_epochs(self._last_epoch())
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._end()
        return self

    def train(self) -> Trainer:
        """Train on the data that the trainer was made with."""
        return self.fit()

    def _run_epochs(self, last: int | None) -> None:
        config, context, fire = self.config, self._context, self._dispatchers
        ending = self._apply_requests()
        while not ending and (last is None or self._position.epoch < last):
            context.epoch = self._position.epoch
            if not self._position.batches:  # else it is resumed, and has means already
                context.means = Means()
                self._position.validated = {}
            if fire.on_epoch_start is not None:
                fire.on_epoch_start(context)
            whole = self._run_epoch()
            self._in_between = False  # a checkpoint that is asked for now waits for the epoch's end
            self._stop_for_nan(self._nan.finish())
            every = config.validate_every_epochs
            due = whole and every is not None and (context.epoch + 1) % every == 0
            if self._val is not None and due:
                self.validate()
            context.made_metrics = Metrics(context.means.means() | self._position.validated)
            if fire.on_epoch_end is not None:
                fire.on_epoch_end(context)
            self._run_log.epoch(context.step, context.epoch, context.means.means())
            if whole:
                self._end_epoch(context.made_metrics)
            self._in_between = True
            ending = self._apply_requests()

    def _run_epoch(self) -> bool:
        """The batches of an epoch; False when training ends before them."""
        stream, position = self._stream(), self._position
        length = stream.length()
        self._progress.epoch(self._context.epoch, length)
        whole = self._run_batches(position.remaining_batches(stream, self.device), length)
        if self._accumulated_losses:  # loaders without length ended within a group
            self._finish_group()
        if not position.batches:
            raise TrainingError("The loaders gave no batch, so there is nothing to train on.")
        return whole

    def _run_batches(
        self, batches: Iterable[tuple[Any, int, int, str]], length: int | None
    ) -> bool:
        """Train on batches, and step when they complete one; False when training ends before them.

        What stays the same in a run is read before the loop. Which hooks there are does not, so
        `fire` is looked at for each event; and what was asked of the trainer is in `requests`.
        """
        context, fire, strategy, requests = (
            self._context,
            self._dispatchers,
            self.strategy,
            self._requests,
        )
        position, group, compute_loss, model = (
            self._position,
            self._accumulated_losses,
            self._compute_loss,
            self.model,
        )
        accumulate, autocasts, moves = self._accumulate, self._autocasts, strategy.needs_transfer
        reads_at_once, counts = self._reads_at_once, self._tokens_fn is not None
        many, limit = self._many_loaders, self._limit
        looks = self._validate_every is not None or not strategy.alone
        mean_loss = context.means.of("train/loss")
        advance = self._progress.advance if self._progress.shows else None
        self._in_between = False  # what is saved now would be half a step
        for batch, batch_idx, loader_idx, loader_name in batches:
            position.batches += 1
            context.batch, context.batch_idx = batch, batch_idx
            context.dataloader_idx, context.dataloader_name = loader_idx, loader_name
            context.made_metrics = None
            if fire.on_train_batch_start is not None:
                fire.on_train_batch_start(context)
            tokens = self._tokens(batch) if counts or type(batch) is not tuple else 0
            if moves:
                batch = strategy.move(batch)

            # forward and loss; on_before_forward and on_after_forward come from the model's call
            if autocasts:
                with strategy.autocast():
                    loss, extra = compute_loss(model, batch)
            else:
                loss, extra = compute_loss(model, batch)
            if not loss.requires_grad:
                raise TrainingError(_NO_GRADIENT)
            own: Any = loss.item() if reads_at_once else loss.detach()

            # backward, of a batch in a group divided by the group's size
            size = 1 if accumulate == 1 else self._group_size()
            complete = size == 1 or len(group) + 1 >= size or position.batches == length
            if size > 1:
                loss = loss / size
            if fire.on_before_backward is not None:
                context.loss = loss
                fire.on_before_backward(context)
            if complete:
                strategy.backward(loss)
            else:
                with strategy.no_sync():
                    strategy.backward(loss)
            if fire.on_after_backward is not None:
                fire.on_after_backward(context)
            if not reads_at_once or own - own != 0.0:  # not finite; or it has to be looked at later
                self._check_loss(own)

            # the step, when this batch completes one
            group.append(own)
            if complete:
                self._run_step()

            # the end of the batch, and of the step
            context.latest_loss = own
            context.tokens_seen += tokens
            if reads_at_once:
                mean_loss.total += own
                mean_loss.weight += 1.0
            else:
                mean_loss.add(own)
            if extra or many:
                self._add_means(own, extra, loader_name)
            if fire.on_train_batch_end is not None:
                context.loss, context.extra = LazyFloat(own), dict(extra)
                fire.on_train_batch_end(context)
            if complete:
                self._end_step()
            if advance is not None:
                advance(context.step, own)  # not read, unless it redraws
            if (
                complete
                and (looks or requests.pending or context.step >= limit)
                and self._boundary()
            ):
                self._in_between = True
                return position.batches == length
        self._in_between = True
        return True

    def _run_step(self) -> None:
        """Every optimizer that is due has its turn."""
        context, fire, strategy, requests = (
            self._context,
            self._dispatchers,
            self.strategy,
            self._requests,
        )
        schedulers, asks = self._by_step, not strategy.alone
        if schedulers:
            context.keep_lr()  # they will have changed it when hooks ask which one was used
        if self._has_optimizer_schedule:
            self._take_turns()
        context.skipped = True
        for idx, optimizer in self._due_optimizers:
            context.optimizer_idx = idx
            if self._autocasts:
                strategy.unscale(optimizer)
            if fire.on_gradients_ready is not None:
                fire.on_gradients_ready(context)
            if fire.update is not None:
                fire.update(context)
                context.made_gradients = None  # or it would keep them alive
            if self._clips:
                self._clip(optimizer)
            if fire.on_before_optimizer_step is not None:
                fire.on_before_optimizer_step(context)
            reason = self._why_skipped(idx) if asks or requests.pending else ""
            if not reason and not strategy.step(optimizer):
                reason = "the scaler found non-finite gradients"
            if reason:
                context.reason = reason
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
            strategy.end_step()
        if self._clips:
            self._add_up_norms()
        if asks or requests.pending:
            requests.skips.clear()
        if not context.skipped:
            context.step += 1

    def _end_step(self) -> None:
        context, fire, group, run = (
            self._context,
            self._dispatchers,
            self._accumulated_losses,
            self._run_log.run,
        )
        loss = group[0] if len(group) == 1 else _mean_of(group)
        if fire.on_step_end is not None:
            context.loss = LazyFloat(loss)
            fire.on_step_end(context)
        if run is not None:
            run.log(context.step, context.epoch, "train/loss", loss)
        for _, optimizer in self._due_optimizers:
            zero_grad(optimizer)
        if self._probes is not None:
            self._probes.end_step()
        group.clear()
        context.clipped_norm = None
        context.step_in_progress = context.step + 1

    def _boundary(self) -> bool:
        """Between two steps: validation, then what was asked for; True when training ends here."""
        every, context = self._validate_every, self._context
        due = every is not None and not context.skipped and context.step % every == 0
        if due and self._val is not None:
            self.validate()
        return self._apply_requests()

    def _apply_requests(self) -> bool:
        """Do what was asked for, on all ranks alike; return whether training ends here."""
        requests = self._requests
        stop, save = self.strategy.any_rank(
            requests.stop_reason is not None, bool(requests.checkpoints)
        )
        if stop:
            requests.stop("another process asked for it")  # where it was asked, that reason stays
        if save:
            self._save_what_was_asked_for()
        if self._probes is not None and self._probes.waiting:
            self._probes.sync(on=True)
        requests.pending = bool(requests.skips or requests.checkpoints)
        return stop or self._context.step >= self._limit

    # -- validation -------------------------------------------------------------------------------

    def validate(self, loaders: Any = None) -> Metrics:
        """Validate, and return the metrics. Mode and random numbers are as they were afterwards."""
        stream = self._val if loaders is None else Stream(loaders, what="val")
        if stream is None:
            raise TrainingError("There is nothing to validate on. Give val_loaders to fit().")
        context, fire = self._context, self._dispatchers
        kept = context.batch, context.batch_idx, context.dataloader_idx, context.dataloader_name
        means = Means()
        context.evaluating = True
        with evaluation(self.model, self.device):
            if fire.on_validation_start is not None:
                fire.on_validation_start(context)
            for drawn in stream.epoch():
                self._validate_batch(drawn, means, many=len(stream.names) > 1)
            context.made_metrics = metrics = Metrics(means.means())
            if fire.on_validation_end is not None:
                fire.on_validation_end(context)
        context.evaluating = False
        context.batch, context.batch_idx, context.dataloader_idx, context.dataloader_name = kept
        self._position.validated = dict.copy(metrics)
        self._run_log.metrics(context.step, context.epoch, metrics)
        self._progress.validation(metrics, context.epoch, context.step)
        if "val/accuracy" in metrics:
            self.best_accuracy = max(self.best_accuracy, float(metrics["val/accuracy"]))
        return metrics

    def _validate_batch(self, drawn: LoadedBatch, means: Means, *, many: bool) -> None:
        context, fire, strategy = self._context, self._dispatchers, self.strategy
        context.batch, context.batch_idx = drawn.batch, drawn.batch_idx
        context.dataloader_idx, context.dataloader_name = drawn.loader_idx, drawn.loader_name
        context.made_metrics = None
        if fire.on_validation_batch_start is not None:
            fire.on_validation_batch_start(context)
        batch = strategy.move(drawn.batch) if strategy.needs_transfer else drawn.batch
        with strategy.autocast():
            loss, extra = self._compute_loss(self.model, batch)
        weight = float(samples_in(drawn.batch))
        for name, value in {"loss": loss, **extra}.items():
            means.add(f"val/{name}", value, weight)
            if many:
                means.add(f"val/dl_{drawn.loader_name}/{name}", value, weight)
        if fire.on_validation_batch_end is not None:
            context.loss, context.extra = LazyFloat(loss.detach()), dict(extra)
            fire.on_validation_batch_end(context)

    # -- what hooks and users may call ------------------------------------------------------------

    def training_step(self, batch: Any) -> LazyFloat:
        """Handle one batch, and step when its group is complete; return its loss.

        For those who drive the loop themselves. The first call starts the run; `finish()` ends it.
        """
        try:
            if not self._running:
                self._by_hand = True
                self._begin(None)
                if self._dispatchers.on_epoch_start is not None:
                    self._dispatchers.on_epoch_start(self._context)
            self._run_batches([(batch, self._position.batches, 0, "train")], None)
            return LazyFloat(self._context.latest_loss)
        except BaseException as error:
            self._fail(error)
            self._end()
            raise

    def finish(self, status: str = "completed") -> None:
        """End a run that was driven by hand: steps with an incomplete group, ends the epoch."""
        if not self._running:
            return
        context = self._context
        try:
            if self._accumulated_losses:
                self._finish_group()
            self._stop_for_nan(self._nan.finish())
            context.made_metrics = Metrics(context.means.means())
            if self._dispatchers.on_epoch_end is not None:
                self._dispatchers.on_epoch_end(context)
            context.status = status
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._end()

    def stop(self, reason: str = "") -> None:
        """End training after this step, from anywhere."""
        self._requests.stop(reason)

    def skip_optimizer_step(self, idx: int | None = None, reason: str = "a hook asked") -> None:
        """Let an optimizer not step this time; None: all of them."""
        if idx is not None and not 0 <= idx < len(self.optimizers):
            raise IndexError(f"There is no optimizer {idx}; there are {len(self.optimizers)}.")
        self._requests.skip(-1 if idx is None else idx, reason)

    def save_checkpoint(self, path: Path | str | None = None) -> Path | None:
        """Save all that a resumed run needs; return where.

        Within a step or the end of an epoch, this is done when it is over, and None is returned.
        """
        if not self._in_between:
            self._requests.checkpoint(path)
            return None
        return self._save(path)

    def _save(self, path: Path | str | None) -> Path:
        self._run_log.flush()  # or a run that is resumed from here might lack values before it
        saved = save_trainer_checkpoint(
            self, self._run_log.checkpoint_folder(path, self._context.step)
        )
        self._run_log.event("checkpoint", path=str(saved), step=self._context.step)
        self._context.checkpoint_path = saved
        if self._dispatchers.on_checkpoint_save is not None:
            self._dispatchers.on_checkpoint_save(self._context)
        return saved

    def add_console_logging(self, log_every_n_batches: int = 10, **options: Any) -> str:
        """Print how training goes, every so many batches; return the hook's name."""
        given = {"log_every_n_batches": log_every_n_batches, **options}
        return self.add_hook(make_hook("console_log", given))

    def add_json_logging(self, log_every_n_batches: int = 100, **options: Any) -> str:
        """Write how training goes as JSON lines; return the hook's name."""
        given = {"log_every_n_batches": log_every_n_batches, **options}
        return self.add_hook(make_hook("json_log", given))

    def add_checkpointing(self, save_every_n_epochs: int = 1, **options: Any) -> str:
        """Save a checkpoint every so many epochs; return the hook's name."""
        given = {"save_every_n_epochs": save_every_n_epochs, **options}
        return self.add_hook(make_hook("checkpoint", given))

    def log(self, name: str, value: Any, kind: Kind = "scalar") -> None:
        """Record a value with this step: a scalar, or a histogram, text or image by `kind`."""
        if kind != "scalar" and kind not in get_args(Kind):
            raise RunError(f"Unknown kind '{kind}'. There are {listed(get_args(Kind))}.")
        self._run_log.value(self._context.step, self._context.epoch, name, value, kind)

    def log_dict(self, values: Mapping[str, Any]) -> None:
        """Record several scalars with this step."""
        for name, value in values.items():
            self.log(name, value)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first optimizer."""
        return self.optimizers[0]

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function; it may be replaced while training."""
        return self._compute_loss.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: Callable[..., Any] | None) -> None:
        self._compute_loss.loss_fn = loss_fn

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._context.step

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._context.epoch

    @property
    def status(self) -> str:
        """How training stands, or how it ended."""
        return self._context.status

    @property
    def stop_reason(self) -> str | None:
        """Why training was asked to stop; None when it was not."""
        return self._requests.stop_reason

    @property
    def validates(self) -> bool:
        """Whether there is data to validate on."""
        return self._val is not None

    @property
    def run(self) -> Any:
        """The run and its folder; None without a record."""
        return self._context.run

    # -- beginning and end ------------------------------------------------------------------------

    def _take_data(self, loaders: Any, val_loaders: Any) -> None:
        if loaders is not None:
            mixing = self.config.loaders
            self._train = Stream(
                loaders,
                MixConfig(
                    order=mixing.order,
                    pattern=tuple(mixing.pattern) if mixing.pattern is not None else None,
                    weights=mixing.weights,
                    length=mixing.length,
                    on_exhausted=mixing.on_exhausted,
                ),
                what="train",
            )
        if val_loaders is not None:
            self._val = Stream(val_loaders, what="val")
        self._stream()

    def _begin(self, resume_from: Any) -> None:
        config, context = self.config, self._context
        self.strategy.check_processes()
        self._running = True
        self._read_config()
        context.status = "training"
        context.exception = None
        context.evaluating = False
        context.step, context.step_in_progress, context.tokens_seen = 0, 1, 0
        self._position = DataPosition()
        self._nan = DeferredNanCheck()
        self._round = 0
        self._accumulated_losses.clear()
        self._requests = ControlRequests()
        if config.seed is not None:
            seed_everything(config.seed)
        if not self.model.training:  # modes within a model that trains are the user's
            self.model.train()
        restored = None if resume_from is None else load_trainer_checkpoint(self, resume_from)
        self._run_log = RunLog(config.runs)
        self._run_log.start(self, restored)
        context.run = self._run_log.run
        self._progress = make_progress(config.progress)
        self._progress.start(
            epochs=self._last_epoch(), steps=config.max_steps, first_step=context.step
        )
        self._started = True
        self._sync_probes()
        self.hooks.run_started()
        if self._dispatchers.on_train_start is not None:
            self._dispatchers.on_train_start(context)
        if restored is not None and self._dispatchers.on_checkpoint_load is not None:
            context.checkpoint_path = restored
            self._dispatchers.on_checkpoint_load(context)

    def _fail(self, error: BaseException) -> None:
        context = self._context
        context.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        context.exception = error
        if self._started and self._dispatchers.on_exception is not None:
            try:
                self._dispatchers.on_exception(context)
            except HooklineError:  # the first error matters more, and is raised
                log.exception("A hook failed while it was told of an exception.")

    def _end(self) -> None:
        context = self._context
        if not self._running:
            return
        started = self._started
        self._running = self._started = self._by_hand = False
        self._in_between = True
        failed = context.status in ("error", "interrupted")
        if context.status == "training":
            context.status = "completed" if self._requests.stop_reason is None else "stopped"
        try:
            if started and self._dispatchers.on_train_end is not None:
                self._dispatchers.on_train_end(context)
        except HooklineError:
            if not failed:
                raise
            log.exception("A hook failed while it was told how training ended.")
        finally:
            self._sync_probes()
            self.hooks.run_ended()
            summary = self.hooks.summary()
            self._progress.end(context.status, summary)
            self._run_log.close(
                context.status, self._requests.stop_reason, summary, context.exception
            )

    def _last_epoch(self) -> int | None:
        """How many epochs; steps alone, when these were given and epochs were not."""
        config = self.config
        if config.max_steps is not None and "max_epochs" not in config.model_fields_set:
            return None
        return config.max_epochs

    def _stream(self) -> Stream:
        if self._train is None:
            raise TrainingError("There is nothing to train on. Give a loader: fit(loader).")
        return self._train

    # -- small parts of the loop ------------------------------------------------------------------

    def _read_config(self) -> None:
        """Read what every batch needs, when a run begins: a configuration's attributes are slow."""
        config = self.config
        self._every = config.optimizer_every or [1] * len(self.optimizers)
        self._has_optimizer_schedule = any(every > 1 for every in self._every)
        self._due_optimizers = list(enumerate(self.optimizers))  # who has a turn in this step
        self._by_step: list[list[Any]] = []  # the schedulers of each optimizer that step with it
        if self.schedulers and config.scheduler_every == "step":
            stepping = [one for one in self.schedulers if not _waits_for_metric(one)]
            self._by_step = [
                [one for one in stepping if one.optimizer is optimizer]
                for optimizer in self.optimizers
            ]
        self._autocasts = config.precision != "fp32"
        self._clips = config.clip_norm is not None or config.clip_value is not None
        self._accumulate = config.accumulate
        self._reads_at_once = self.device.type == "cpu"  # there is no device to wait for
        self._on_nan = config.on_nan
        self._validate_every = config.validate_every_steps
        self._limit = math.inf if config.max_steps is None else config.max_steps
        self._many_loaders = self._train is not None and len(self._train.names) > 1

    def _group_size(self) -> int:
        """How many batches the step in progress has: the last group of an epoch may be smaller."""
        size = self._accumulate
        length = None if self._train is None or self._by_hand else self._train.length()
        if length is None:
            return size
        begun = self._position.batches - 1 - len(self._accumulated_losses)
        return min(size, length - begun)

    def _finish_group(self) -> None:
        """Step with the batches that are there, as if the group had been that small."""
        missing = self._accumulate / len(self._accumulated_losses)
        for optimizer, every in zip(self.optimizers, self._every, strict=True):
            for group in optimizer.param_groups if every == 1 else ():
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(missing)
        self._in_between = False  # what is saved now would be half a step
        self._run_step()
        self._end_step()
        self._boundary()
        self._in_between = True

    def _add_means(self, loss: Any, extra: Mapping[str, Any], loader: str) -> None:
        means = self._context.means
        for name, value in extra.items():
            means.add(f"train/{name}", value)
        if self._many_loaders:
            for name, value in {"loss": loss, **extra}.items():
                means.add(f"train/dl_{loader}/{name}", value)

    def _take_turns(self) -> None:
        """Choose the optimizers of this step; the gradients of others go on accumulating."""
        self._round += 1
        turns = enumerate(self.optimizers)
        self._due_optimizers = [(i, one) for i, one in turns if self._round % self._every[i] == 0]

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        context, config = self._context, self.config
        context.clipped_norm = self.strategy.clip(optimizer, config.clip_norm, config.clip_value)
        self._norms.append(context.clipped_norm)
        if self._dispatchers.on_gradient_clip is not None:
            self._dispatchers.on_gradient_clip(context)

    def _add_up_norms(self) -> None:
        """Make it the norm of all gradients, where each optimizer's were clipped by themselves."""
        if len(self._norms) > 1:
            self._context.clipped_norm = torch.linalg.vector_norm(torch.stack(self._norms))
        self._norms.clear()

    def _why_skipped(self, idx: int) -> str:
        """Why this optimizer does not step, on any rank; "" when it does."""
        reason = self._requests.why_skipped(idx)
        (skip,) = self.strategy.any_rank(bool(reason))
        return reason or ("another process asked" if skip else "")

    def _save_what_was_asked_for(self) -> None:
        paths, self._requests.checkpoints = self._requests.checkpoints, []
        for path in paths or [None]:  # none: another process asked
            self._save(path)

    def _check_loss(self, loss: Any) -> None:
        """Look at a loss that may not be finite; on a device, at the one before it."""
        context = self._context
        where = (context.epoch, context.dataloader_name, context.batch_idx)
        if self._on_nan == "skip":
            value = float(loss)  # this waits for the device, as the setting says
            if not math.isfinite(value):
                log.warning("The loss is %s; the step is skipped. %s", value, _place(where))
                self.skip_optimizer_step(None, f"the loss is {value}")
        elif self._on_nan == "stop":
            bad = (loss, where) if self._reads_at_once else self._nan.look(loss, where)
            self._stop_for_nan(bad)

    def _stop_for_nan(self, found: tuple[float, Any] | None) -> None:
        if found is not None:
            raise TrainingError(
                f"The loss was {found[0]}. {_place(found[1])} To go on all the same, set "
                "on_nan='skip' or 'continue'."
            )

    def _end_epoch(self, metrics: Metrics) -> None:
        for scheduler in self.schedulers:
            if _waits_for_metric(scheduler):
                scheduler.step(metrics.get("val/loss", metrics.get("train/loss")))
            elif self.config.scheduler_every == "epoch":
                scheduler.step()
        self._position.end_epoch()

    def _hooks_changed(self) -> None:
        fire = self._dispatchers
        watching = (fire.on_before_forward, fire.on_after_forward, fire.forward)
        calls = any(one is not None for one in watching)
        self._watch.watch(calls=calls, backward=False)
        self._sync_probes()
        if self._running:
            statuses = {info.name: info.status for info in self.hooks.describe()}
            self._run_log.event("hooks", step=self._context.step, hooks=statuses)

    def _sync_probes(self) -> None:
        """Have the probes that are enabled on the model, while training goes on."""
        if self._probes is None and self.hooks.of_kind("probe"):
            from hookline.probes.sync import ProbeSync  # most trainings have none

            self._probes = ProbeSync(self.hooks, self.model, self._context)
        if self._probes is not None:
            self._probes.sync(on=self._running, within_step=not self._in_between)
            self._requests.pending |= self._probes.waiting

    def _before_forward(self) -> None:
        if self._dispatchers.on_before_forward is not None:
            self._dispatchers.on_before_forward(self._context)

    def _after_forward(self, outputs: Any) -> None:
        if self._dispatchers.forward is not None:
            self._context.observation = Observation(outputs, "the model's outputs")
            self._dispatchers.forward(self._context)
            self._context.observation = None
        if self._dispatchers.on_after_forward is not None:
            self._context.outputs = outputs
            self._dispatchers.on_after_forward(self._context)
            self._context.outputs = None


def _nothing() -> None:
    """What the watch of the model need not tell."""


_NO_GRADIENT = (
    "The loss has no gradient: nothing that it was computed from is a parameter that requires one. "
    "Look for `no_grad`, `detach` or frozen parameters."
)


def _waits_for_metric(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def _mean_of(losses: list[Any]) -> Any:
    """The mean of a step's losses, on the device where they are there."""
    if isinstance(losses[0], torch.Tensor):
        return torch.stack([loss.float() for loss in losses]).mean()
    return sum(losses) / len(losses)


def _place(where: tuple[int, str, int]) -> str:
    return f"It was in epoch {where[0]}, loader '{where[1]}', batch {where[2]}."


def get_trainer(
    kind: str,
    model: torch.nn.Module,
    dataloader: Any,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    device: Any = None,
    **options: Any,
) -> Trainer:
    """Return a trainer that has its data: `get_trainer("simple", model, loader, optimizer)`.

    Args:
        kind: "simple".
        model: the model.
        dataloader: what to train on.
        optimizer: the optimizer, or several.
        device: where to train.
        options: the fields of `TrainerConfig`, and `loss_fn`, `step_fn`, `tokens_fn`, `schedulers`,
            `hooks` and `val_loaders`.
    """
    if kind != "simple":
        raise TrainingError(f"There is no trainer '{kind}'. There is: 'simple'.")
    parts = ["loss_fn", "step_fn", "tokens_fn", "schedulers"]
    if isinstance(options.get("hooks"), list | tuple):
        parts.append("hooks")  # hooks themselves; a HooksConfig is a field of the configuration
    given = {name: options.pop(name) for name in parts if name in options}
    val_loaders = options.pop("val_loaders", None)
    config = TrainerConfig(device=None if device is None else str(device), **options)
    trainer = Trainer(config, model, optimizer, **given)
    trainer._take_data(dataloader, val_loaders)
    return trainer
