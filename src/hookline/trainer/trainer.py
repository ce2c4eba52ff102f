"""The trainer: Hookline's own loop, to be read from top to bottom.

    fit → _begin → _run_epochs → _run_epoch → _run_batches → _run_step → _end_step → _boundary
                               → _validate_in_loop                                 → _apply_requests
        → _fail, _end

This file is longer than others, because it is the loop: what happens in a training run stands here
in the order in which it happens. What any loop needs is in `self.loop` (`hookline.loop.Loop`).

All values that hooks get are written into the context. Events are fired as

    if fire.on_step_end is not None: fire.on_step_end(context)

Whatever depends on where training runs goes through the strategy. Nothing here waits for the
device, except where a setting says so.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Never, get_args

import torch

from hookline.arguments import (
    check_flag,
    check_function,
    check_mapping,
    check_name,
    check_path,
    listed_strings,
    show_value,
)
from hookline.config.hook_items import make_hook, split_hooks
from hookline.config.registry import HookRegistry
from hookline.config.trainer_config import HooksConfig, TrainerConfig, checked_hparams
from hookline.context import LazyFloat, Metrics
from hookline.dispatch import HookLike, HookManager
from hookline.errors import (
    ArgumentError,
    CheckpointError,
    HooklineError,
    RunError,
    TrainingError,
    listed,
)
from hookline.hook import Hook
from hookline.interrupts import AllowedInterrupts, HeldInterrupts
from hookline.loop.broadcasts import broadcast_buffers
from hookline.loop.control_requests import ControlRequests, SaveRequest
from hookline.loop.evaluation import count_tokens, make_counter
from hookline.loop.event_context import EventContext, parameters_of, zero_grad
from hookline.loop.loop import Loop, Phase, announce
from hookline.loop.means import Means
from hookline.loop.model_watch import ModelWatch
from hookline.loop.random_state import (
    generator_state,
    generators_of,
    seed_everything,
    set_generator_state,
)
from hookline.loop.record import Record
from hookline.loop.signals import SignalWatch
from hookline.runs.location import shorten_path
from hookline.runs.run import Kind, RemoteRun
from hookline.trackers.group import make_tracker_set
from hookline.trainer.checks import (
    check_functions,
    check_gradient,
    check_metrics,
    check_same_training,
    checked_config,
    checked_model,
    checked_optimizers,
    device_for,
    match_schedulers,
    needs_metric,
    require_all_processes,
)
from hookline.trainer.continuation import describe_settings, fork, resume
from hookline.trainer.data_stream import Stream, end_together, set_loader_epoch, shard_loaders
from hookline.trainer.lifecycle import (
    Preempted,
    describe_run,
    requeue,
    save_after_crash,
    save_for_signal,
    start_record,
    summarize_hooks,
    write_report,
)
from hookline.trainer.losses import (
    LossCheck,
    LossComputer,
    TokenCount,
    mean_loss,
    mean_metrics,
)
from hookline.trainer.position import DataPosition, EpochProgress, make_items
from hookline.trainer.progress import make_progress
from hookline.trainer.strategies import make_strategy
from hookline.trainer.validation import Validation, has_ended_workers
from hookline.updates import Identity as IdentityUpdate

log = logging.getLogger("hookline")
_KINDS = get_args(Kind)


class Trainer:
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

    _needs_accelerate = False  # whether `strategy` may only be "accelerate"

    def __init__(
        self,
        config: TrainerConfig | HooksConfig | Mapping[str, Any] | None,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        schedulers: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        step_fn: Callable[..., Any] | None = None,
        tokens_fn: Callable[[Any], int] | Literal["auto"] | None = "auto",
        hooks: Iterable[HookLike] | HookManager | Mapping[str, Any] = (),
        hparams: Mapping[str, Any] | None = None,
        name: str | None = None,
        tags: Iterable[str] = (),
        accelerator: Any = None,
        trackers: Any = (),
    ) -> None:
        counts_itself = isinstance(tokens_fn, str) and tokens_fn == "auto"
        count: Any = None if counts_itself else tokens_fn
        check_functions(loss_fn=loss_fn, step_fn=step_fn, tokens_fn=count)
        fields, listed_hooks = split_hooks(config)
        self.config = checked_config(fields)
        device = device_for(self.config.device, checked_model(model))
        needs_accelerate = self._needs_accelerate or accelerator is not None
        self.strategy = make_strategy(
            self.config, device, accelerator, needs_accelerate=needs_accelerate
        )
        self.config = self.strategy.config
        self.accelerator = self.strategy.accelerator
        self.device = self.strategy.device
        self.model, self.optimizers = self.strategy.prepare(
            model, checked_optimizers(optimizers, model, self.config.optimizer_every)
        )
        self._called_model = self.model  # what the loop calls: the strategy may wrap the model
        self.schedulers = match_schedulers(
            self.strategy.unwrap_schedulers(schedulers), self.optimizers
        )
        self._loss_computer = LossComputer(step_fn, loss_fn, self.announce)
        self.hparams = checked_hparams(hparams)
        if name is not None:
            check_name("Trainer(…, name=…)", name)
        self.name = name
        self.tags = listed_strings("Trainer(…, tags=…)", tags)
        self._display = make_progress("off")
        self.train_data: Stream | None = None
        self.val_data: Stream | None = None
        self.position = DataPosition()
        self.epoch_progress = EpochProgress()
        self.compared_settings: dict[str, Any] = {}  # those that a checkpoint is compared with
        self._epoch_length: int | None = None  # in batches; None if it is not known
        self._losses: list[Any] = []  # of the batches in the next optimizer step
        self._metrics: list[Mapping[str, Any]] = []  # the same
        self._norms: list[torch.Tensor] = []  # gradient norms of the optimizers in this step
        self._drops_gradients = False  # whether this step leaves none, also for later steps
        self.stop_signal: str | None = None  # that asked the last run to end, as "SIGTERM"
        self.token_count = TokenCount(
            count_tokens if counts_itself else count and make_counter(count)
        )
        self.hooks, context = self._make_hooks(hooks, listed_hooks)
        self.loop = self._make_loop(context)
        self._watch = ModelWatch(self.model, self.loop)
        self._validation = Validation(self.loop, self.strategy, self.model, self.compute_loss)
        self._trackers = make_tracker_set(trackers)
        if self._trackers is not None:
            self._trackers.is_signalled = lambda: self.loop.requests.has_signal
        self._dispatchers = self.hooks.dispatchers
        self._plan = _StepPlan(self)
        self.loop.watch, self.loop.on_fork = self._watch_model, self._leave_in_fork
        self.loop.listen()

    def _make_hooks(
        self, hooks: Iterable[HookLike] | HookManager | Mapping[str, Any], listed_hooks: Any
    ) -> tuple[HookRegistry, EventContext]:
        processes, tokens = self.strategy.processes, self.token_count
        context = tokens.context = EventContext(self, tokens.read_absent)
        context.connect(self.model, self.optimizers)
        context.config, context.run = self.config, None
        context.epoch = context.batch_idx = context.dataloader_idx = 0
        context.batch, context.dataloader_name = None, ""
        tokens.restart()
        configured: Any = None
        if isinstance(hooks, Mapping):
            configured, hooks = hooks, ()
        registry = HookRegistry(self.config.hooks, hooks=hooks, source=context)
        registry.add_configured(listed_hooks)
        registry.add_configured(configured)
        registry.add_default(IdentityUpdate())
        registry.set_process(is_main=processes.is_main, is_local_main=processes.is_local_main)
        return registry, context

    def _make_loop(self, context: EventContext) -> Loop:
        loop = Loop(
            context,
            self.hooks,
            Record(None),
            self.config.checkpoints,
            no_folder=TrainingError(
                "There is no run folder to save into. Give a path: save_checkpoint('…'), or set "
                "`runs` in the configuration."
            ),
            processes=self.strategy.processes,
            is_sharded=self.strategy.is_sharded,
        )
        loop.state.model, loop.state.optimizers = self.model, self.optimizers
        loop.state.schedulers, loop.state.scaler = self.schedulers, self.strategy.scaler
        loop.state.add_items = partial(make_items, self)
        return loop

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled. Save the run with "
            "`trainer.save_checkpoint(path)`, which `fit(resume_from=path)` continues."
        )

    # -- hooks ------------------------------------------------------------------------------------

    @property
    def hook_manager(self) -> HookRegistry:
        """Another name for `hooks`."""
        return self.hooks

    def add_hook(
        self, hook: Hook | Callable[..., Any], name: str | None = None, **options: Any
    ) -> str:
        """Register a hook and return its name; see `HookManager.add_hook`."""
        return self.hooks.add_hook(hook, name, **options)

    def remove_hook(self, name: str) -> Hook:
        """Remove a hook and return it."""
        return self.hooks.remove_hook(name)

    def enable_hook(self, name: str) -> None:
        """Enable a hook."""
        self.hooks.enable_hook(name)

    def disable_hook(self, name: str) -> None:
        """Disable a hook."""
        self.hooks.disable_hook(name)

    def add_console_logging(self, log_every_n_batches: int = 10, **options: Any) -> str:
        """Print the progress every so many batches; return the hook's name."""
        return self._add("console_log", log_every_n_batches=log_every_n_batches, **options)

    def add_json_logging(self, log_every_n_batches: int = 100, **options: Any) -> str:
        """Write the progress as JSON lines; return the hook's name."""
        return self._add("json_log", log_every_n_batches=log_every_n_batches, **options)

    def add_checkpointing(self, save_every_n_epochs: int = 1, **options: Any) -> str:
        """Save a checkpoint every so many epochs; return the hook's name."""
        return self._add("checkpoint", save_every_n_epochs=save_every_n_epochs, **options)

    def _add(self, built_in: str, **options: Any) -> str:
        return self.add_hook(make_hook(built_in, options))

    def _watch_model(self) -> None:
        fire = self._dispatchers
        watched = (fire.on_before_forward, fire.on_after_forward, fire.forward)
        self._watch.watch(calls=self.loop.phase is not Phase.IDLE and any(watched))

    # -- data and loss ----------------------------------------------------------------------------

    def set_data(self, loaders: Any, val_loaders: Any = None) -> None:
        """Set the data to train and to validate on, as for `fit`.

        Without `loaders`, the data to train on stays; without both, also that to validate on.
        """
        if loaders is not None:
            self.train_data = self._make_stream(loaders, "train")
        if loaders is not None or val_loaders is not None:
            self.val_data = None
            if val_loaders is not None:
                self.val_data = self._make_stream(val_loaders, "val")
        if self.train_data is None:
            raise TrainingError("There is no data to train on. Give a loader: fit(loader).")

    def _make_stream(self, loaders: Any, what: Literal["train", "val"]) -> Stream:
        """Return a stream of this process's batches; it may have none to validate on."""
        is_distributed, is_train = self.strategy.is_distributed, what == "train"
        if is_distributed and self.config.shard_loaders:
            loaders = shard_loaders(loaders, self.strategy.processes, what, fill=is_train)
        mixing = self.config.loaders if is_train else None
        return Stream(loaders, mixing, what=what, may_be_empty=not is_train and is_distributed)

    @property
    def validates(self) -> bool:
        """Whether there is data to validate on."""
        return self.val_data is not None

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function; it may be replaced while training."""
        return self._loss_computer.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: Callable[..., Any] | None) -> None:
        if loss_fn is not None:
            check_function("loss_fn", loss_fn, "outputs", "targets")
        self._loss_computer.loss_fn = loss_fn

    @property
    def step_fn(self) -> Callable[..., Any] | None:
        """The function `step_fn(model, batch)` that computes loss and metrics, if there is one."""
        return self._loss_computer.step_fn

    def compute_loss(self, batch: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Return the loss of a batch and its other metrics, as in a training step."""
        with self.strategy.autocast():
            return self._loss_computer(self.model, self.strategy.move(batch))

    def compute_loss_apart(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, as in a training step, unseen by hooks and probes."""
        context, watch = self.loop.context, self._watch
        evaluating, context.evaluating = context.evaluating, True
        watch.is_paused = True
        try:
            return self.compute_loss(batch)[0]
        finally:
            context.evaluating, watch.is_paused = evaluating, False

    def sample_indices(self, loader_idx: int, batch_idx: int) -> Any:
        """Return the indices of a train loader's latest batch in its dataset; None if unknown."""
        return self.position.sample_indices(loader_idx, batch_idx)

    def dry_run(self, batch: Any) -> dict[str, Any]:
        """Compute the loss of a batch and its gradients, without hooks; return what was seen."""
        parameters = [p for optimizer in self.optimizers for p in parameters_of(optimizer)]
        self.model.train()
        try:
            loss, metrics = self.compute_loss(batch)
            check_gradient(loss)
            self.strategy.backward(loss)
            reached = sum(parameter.grad is not None for parameter in parameters)
        finally:
            self.model.zero_grad(set_to_none=True)
        return {
            "loss": float(loss.detach()),
            "gradients": reached,
            "parameters": len(parameters),
            "metrics": ["loss", *metrics],
        }

    def announce(self, text: str) -> None:
        """Tell users something: in the log if it is configured, else with the progress."""
        if self.strategy.processes.is_main:
            announce(text, self._display.say)

    # -- where training stands --------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first optimizer."""
        return self.optimizers[0]

    @property
    def step(self) -> int:
        """The number of completed optimizer steps."""
        return self.loop.context.step

    @property
    def status(self) -> str:
        """`training`, or how it ended: `completed`, `stopped`, `interrupted` or `error`."""
        return self.loop.context.status

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self.loop.context.epoch

    @property
    def tokens_seen(self) -> int:
        """The number of tokens trained on; 0 where it is not known."""
        return self.token_count.count

    @property
    def best_accuracy(self) -> float:
        """The best `val/accuracy` so far."""
        return self.loop.state.best_accuracy

    @best_accuracy.setter
    def best_accuracy(self, accuracy: float) -> None:
        self.loop.state.best_accuracy = accuracy

    @property
    def max_epochs(self) -> int | None:
        """The number of epochs to train; None if only the number of steps is limited."""
        config = self.config
        if config.max_steps is not None and "max_epochs" not in config.model_fields_set:
            return None
        return config.max_epochs

    @property
    def stop_reason(self) -> str | None:
        """Why a hook or user requested to stop; None without a request."""
        return self.loop.requests.stop_reason

    @property
    def run(self) -> Any:
        """The run and its folder; None if no run is written."""
        return self.loop.context.run

    # -- requests ---------------------------------------------------------------------------------

    def stop(self, reason: str = "") -> None:
        """Stop training after this step."""
        self.loop.stop(reason)

    @property
    def should_stop(self) -> bool:
        """Whether training stops after this step; setting it is the same as `stop()`."""
        return self.loop.requests.stop_reason is not None

    @should_stop.setter
    def should_stop(self, should_stop: bool) -> None:
        if should_stop:
            self.stop("trainer.should_stop was set")
        else:
            self.loop.requests.stop_reason = None

    def skip_optimizer_step(self, idx: int | None = None, reason: str = "a hook asked") -> None:
        """Skip the next step of an optimizer, or of all of them.

        Args:
            idx: the optimizer's number; None for all.
            reason: given to `on_step_skipped`.
        """
        self.loop.requests.skip(idx, reason, len(self.optimizers))

    def log(self, name: str, value: Any, kind: Kind = "scalar") -> None:
        """Record a value with this step: a scalar, histogram, text or image, as `kind` says."""
        check_name("trainer.log(name)", name)
        if kind not in _KINDS:
            raise RunError(f"Unknown kind {show_value(kind)}. There are {listed(_KINDS)}.")
        context = self.loop.context
        self.loop.record.value(context.step, context.epoch, name, value, kind)

    def log_dict(self, values: Mapping[str, Any]) -> None:
        """Record several numbers with this step."""
        for name, value in check_mapping("log_dict(values)", values).items():
            self.log(name, value)

    # -- checkpoints ------------------------------------------------------------------------------

    def register_for_checkpoint(self, *names: str) -> None:
        """Save attributes of this object, which a hook has set on it, in checkpoints.

            def on_train_start(self, trainer):
                trainer.best_epoch = 0
                trainer.register_for_checkpoint("best_epoch")

        In a resumed run, this call restores them. A value is what a checkpoint can hold, or an
        object with `state_dict` and `load_state_dict`.
        """
        self.loop.attributes.register(*names)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, apart from the model's weights."""
        return self.loop.state.collect()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: the run cannot be resumed exactly with this trainer's data.
        """
        state = check_mapping("load_state_dict(state)", state)
        if "optimizers" not in state or "position" not in state:
            raise CheckpointError("load_state_dict(state) takes what state_dict() returned.")
        self.loop.state.restore(state)

    def save_checkpoint(
        self, path: Path | str | None = None, *, weights_only: bool = False
    ) -> Path | None:
        """Save all that a resumed run needs; return the checkpoint's folder once it is durable.

        Within a step or the end of an epoch, the state is saved when that is over, and None is
        returned: `on_checkpoint_save` then has the folder. Of several processes, one is enough to
        ask for it while training runs; before and after, all of them have to call this.

        Args:
            path: the checkpoint's folder; None: `checkpoints/step_…` in the run's folder.
            weights_only: save only the model's weights, from which no run can be resumed.
        """
        check_flag("save_checkpoint(…, weights_only=…)", weights_only)
        if path is not None:
            path = Path(check_path("save_checkpoint(path)", path, "a folder")).absolute()
        loop, request = self.loop, SaveRequest(path, weights_only)
        if loop.is_forked:
            return None
        checkpoints, is_distributed = loop.checkpoints, self.strategy.is_distributed
        if loop.phase is Phase.IN_STEP or (checkpoints.is_announcing and is_distributed):
            loop.requests.checkpoint(request)
            return None
        if checkpoints.is_serving_end:
            return checkpoints.save_while_ending(request)
        require_all_processes(self, "trainer.save_checkpoint()")
        try:
            return checkpoints.save(checkpoints.with_folders([request]), wait=True)
        finally:
            if loop.phase is Phase.IDLE:
                loop.close_checkpoints()

    def _save_requested(self) -> None:
        checkpoints = self.loop.checkpoints
        if not self.loop.is_forked:
            checkpoints.save(checkpoints.with_folders(checkpoints.gather_requests()))

    # -- a run ------------------------------------------------------------------------------------

    def fit(
        self,
        loaders: Any = None,
        val_loaders: Any = None,
        *,
        resume_from: Any = None,
        fork_from: Any = None,
    ) -> Trainer:
        """Train.

        A signal such as SIGTERM (see `CheckpointConfig.signals`) saves a checkpoint at the next
        step boundary or between two validation batches; `fit` then returns with the status
        `preempted`. Ctrl-C saves in the same way, and raises KeyboardInterrupt.

        Args:
            loaders: one loader, a list, or a mapping by name; see `TrainerConfig.loaders`.
            val_loaders: the same, for validation.
            resume_from: the folder of a run or checkpoint to continue; "auto" for the newest
                unfinished run with the same configuration, or a new run if there is none.
            fork_from: the folder of a run or checkpoint from which a new run starts, with the
                settings of this trainer where they differ.
        """
        if resume_from is not None:
            resume_from = check_path("fit(…, resume_from=…)", resume_from, "a run or a checkpoint")
        if fork_from is not None:
            fork_from = check_path("fit(…, fork_from=…)", fork_from, "a run or a checkpoint")
            if resume_from is not None:
                raise ArgumentError(
                    "fit() got both resume_from, which continues a run, and fork_from, which "
                    "starts a new one. Give one of them."
                )
        self.set_data(loaders, val_loaders)
        if resume_from is None and fork_from is None:  # else there are metrics and ended epochs
            check_metrics(self)
            validates = self.config.validate_every_epochs == 1
            for stream in (self.train_data, self.val_data if validates else None):
                if stream is not None:
                    stream.check_restartable(self.max_epochs or 1)
        settings = self.config.checkpoints
        requests = self.loop.requests = ControlRequests(settings.grace_seconds)
        with SignalWatch(requests, settings.signals):
            try:
                self._begin(resume_from, fork_from)
                if self.epoch_progress.sanity_due and self.val_data is not None:
                    self._validate_in_loop()
                self.epoch_progress.sanity_due = False
                self._run_epochs(self.max_epochs)
            except Preempted:
                self.loop.context.status = "preempted"
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._end()
        self._check_late_signal()
        write_report(self, self._display.say)
        return self

    def train(self) -> Trainer:
        """Train on the data that the trainer was made with."""
        return self.fit()

    def _begin(self, resume_from: Any, fork_from: Any = None) -> None:
        config, loop, processes = self.config, self.loop, self.strategy.processes
        context = loop.context
        loop.phase = Phase.STARTING
        loop.leave_in_forks()
        self._plan = _StepPlan(self)
        context.restart()
        context.validated = {}
        self.token_count.restart()
        self.position = DataPosition()
        self.position.val_loaders = () if self.val_data is None else self.val_data.loaders
        loop.state.restored_position = self.stop_signal = None
        self.epoch_progress = EpochProgress(sanity_due=config.sanity)
        self._losses.clear()
        self._metrics.clear()
        if config.seed is not None:
            seed_everything(config.seed + processes.rank)
        if not self.model.training:  # the modes of modules in a training model are the user's
            self.model.train()
        self._display = make_progress(config.progress if self.strategy.processes.is_main else "off")
        context.config = config
        loop.begin(Record(config.runs, self._trackers), config.checkpoints)
        identity = describe_run(self)  # before anything is loaded
        self.compared_settings = describe_settings(config, identity.training)
        if self.strategy.is_distributed:
            check_same_training(self, identity.training)
        restored: Path | None = None
        parent: Any = None
        if fork_from is not None:
            restored, parent = fork(self, fork_from)
        elif resume_from is not None:
            restored, self.compared_settings = resume(self, identity, resume_from)
        started = processes.call_on_main(lambda: start_record(self, identity, restored, parent))
        run = loop.record.run
        context.run = RemoteRun(*started) if started and run is None else run
        loop.record.start_monitor(self.device, self.hooks, lambda: context.known("tokens_seen"))
        self._called_model = self.strategy.wrap(self.model)
        loop.ranks.begin()
        self._display.start(epochs=self.max_epochs, steps=config.max_steps, first_step=context.step)
        if run is not None:
            self._display.say(f"run {shorten_path(run.path)}")
        loop.phase = Phase.BETWEEN_STEPS
        self._watch_model()
        loop.sync_probes()
        self.hooks.run_started()
        if loop.checkpoints.prepares:
            loop.requests.wake()
        if self.strategy.is_distributed:  # hooks of one process may ask for a checkpoint
            loop.phase = Phase.IN_STEP
        loop.fire("on_train_start")
        if restored is not None:
            context.checkpoint_path = restored
            loop.fire("on_checkpoint_load")
        loop.phase = Phase.BETWEEN_STEPS

    # -- epochs -----------------------------------------------------------------------------------

    def _run_epochs(self, max_epochs: int | None) -> None:
        config, loop = self.config, self.loop
        context, progress = loop.context, self.epoch_progress
        assert self.train_data is not None  # `fit` has set it
        # Within an epoch, a run that stops also ends the epoch, so that is where it looks.
        within_epoch = self.position.batches > 0 and not progress.epoch_over
        stop = not within_epoch and self._apply_requests()
        if stop:  # also a resumed run in which EarlyStopping stops again
            context.epoch = progress.last_epoch
        while not stop and (max_epochs is None or self.position.epoch < max_epochs):
            context.epoch = self.position.epoch
            progress.epoch_over = False
            resumed = self.position.batches > 0  # within the epoch: it has means already
            if not resumed:
                context.means, context.validated = Means(), {}
            loop.phase = Phase.IN_STEP  # checkpoints wait until all hooks were called
            with loop.record.paused(resumed or progress.epoch_started):  # recorded before
                loop.fire("on_epoch_start")
            loop.phase = Phase.BETWEEN_STEPS
            progress.epoch_started = True
            if self.strategy.is_distributed or self.accelerator is not None:
                set_loader_epoch(self.train_data.loaders, context.epoch)
            (save,) = self.strategy.processes.any(bool(loop.requests.checkpoints))
            if save:
                self._save_requested()
            complete = self._run_epoch()
            loop.phase = Phase.IN_STEP  # checkpoints that are requested now wait
            self._plan.loss_check.finish()
            every = config.validate_every_epochs
            due = complete and every is not None and (context.epoch + 1) % every == 0
            if self.val_data is not None and due:
                self._validate_in_loop()
            if self.strategy.is_distributed:
                loop.ranks.records.report(loop.record.sink)
            loop.end_epoch(loop.ranks.means(context.means))
            progress.epoch_over, progress.epoch_started = True, False
            if complete:
                self._end_epoch(context.metrics)
            loop.phase = Phase.BETWEEN_STEPS
            stop = self._apply_requests()

    def _end_epoch(self, metrics: Metrics) -> None:
        for scheduler in self.schedulers:
            if needs_metric(scheduler):
                # hooks may have changed it in one process; not every epoch may be validated
                loss = self.strategy.processes.broadcast(metrics.get("val/loss"))
                if loss is not None:
                    scheduler.step(loss)
            elif self.config.scheduler_every == "epoch":
                scheduler.step()
        self.position.end_epoch()

    def _run_epoch(self) -> bool:
        """Train on the batches of an epoch; return False if training stops before its end."""
        stream, position = self.train_data, self.position
        assert stream is not None  # `fit` has set it
        self._epoch_length = length = stream.length()
        batches = position.remaining_batches(stream, self.device)
        if self.strategy.is_distributed:
            batches, length = self._end_together(batches, length)
        self._display.epoch(self.loop.context.epoch, length, position.batches)
        is_due = self.epoch_progress.validation_due
        if position.batches and self._boundary(validate=is_due):
            return position.batches == length
        self.loop.record.phases.wait_for_data()
        try:
            complete = self._run_batches(batches, length)
        except RuntimeError as error:
            if not has_ended_workers(error, self.loop.requests):
                raise
            self._leave(can_save=not self._losses)
        if self._losses:  # loaders without length ended within a step
            self._finish_step()
        if not position.batches:
            raise TrainingError("The loaders gave no batch, so there is nothing to train on.")
        return complete

    def _end_together(
        self, batches: Iterator[Any], length: int | None
    ) -> tuple[Iterator[Any], int | None]:
        """Return batches that end in the same step in all processes, and their number."""
        processes, position = self.strategy.processes, self.position
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

    # -- batches and steps ------------------------------------------------------------------------

    def _run_batches(
        self, batches: Iterable[tuple[Any, int, int, str]], length: int | None
    ) -> bool:
        """Train on batches and step when they complete a step; return False if training stops.

        What does not change in a run is read before the loop. Hooks may change at any time, so
        `fire` is read for each event, and `requests` has what hooks and users requested.
        """
        loop, fire, plan = self.loop, self._dispatchers, self._plan
        context, requests, phases = loop.context, loop.requests, loop.record.phases
        position, losses, limit = self.position, self._losses, plan.limit
        model, compute_loss, accumulate = self._called_model, self._loss_computer, plan.accumulate
        strategy, autocasts, multi_loader = self.strategy, plan.autocasts, plan.multi_loader
        reads_at_once, tokens = plan.reads_at_once, self.token_count
        multi_rank = strategy.is_distributed
        check_boundary = plan.validate_every is not None or multi_rank or strategy.has_trigger
        mean_loss, count_tokens = context.means.of("train/loss"), tokens.count_batch
        timed = phases.timed  # whether clocks are read in this batch
        advance = self._display.advance if self._display.shows else None
        loop.phase = Phase.IN_STEP
        for batch, batch_idx, loader_idx, loader_name in batches:
            if timed:
                phases.begin_batch()
            position.batches += 1
            context.batch, context.batch_idx = batch, batch_idx
            context.dataloader_idx, context.dataloader_name = loader_idx, loader_name
            context.event_metrics = None
            if fire.on_train_batch_start is not None:
                fire.on_train_batch_start(context)
            batch_tokens = None if count_tokens is None else count_tokens(batch)
            if strategy.needs_transfer:
                batch = strategy.move(batch)

            # under accumulation, gradients are reduced by the backward that completes a step
            size = 1 if accumulate == 1 else self._step_size()
            complete = size == 1 or len(losses) + 1 >= size or position.batches == length
            if accumulate > 1:  # without a length, the epoch may end before the step is complete
                strategy.begin_batch(completes_step=complete, sync=complete or length is None)

            # forward and loss; on_before_forward and on_after_forward come from the model's call
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
            if count_tokens is not None:
                tokens.add(batch_tokens)
            if reads_at_once:
                mean_loss.total += batch_loss
                mean_loss.weight += 1.0
            else:
                mean_loss.add(batch_loss)
            if extra or multi_loader:
                self._add_means(batch_loss, extra, loader_name)
                self._metrics.append(extra)
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
                loop.phase = Phase.BETWEEN_STEPS
                return position.batches == length
            if timed or phases.remaining <= 2:
                timed = phases.end_batch()
            else:
                phases.remaining -= 1
        loop.phase = Phase.BETWEEN_STEPS
        return True

    def _step_size(self) -> int:
        """Return the number of batches in this step: the last step of an epoch may have fewer."""
        length, accumulate = self._epoch_length, self._plan.accumulate
        if length is None:
            return accumulate
        first = self.position.batches - 1 - len(self._losses)
        return min(accumulate, length - first)

    def _add_means(self, loss: Any, extra: Mapping[str, Any], loader: str) -> None:
        means = self.loop.context.means
        for name, value in extra.items():
            means.add(f"train/{name}", value)
        if self._plan.multi_loader:
            for name, value in {"loss": loss, **extra}.items():
                means.add(f"train/dl_{loader}/{name}", value)

    def _check_loss(self, loss: Any) -> TrainingError | None:
        """Skip the step of a loss that is not finite, or return the error to raise after it."""
        context = self.loop.context
        place = f"epoch {context.epoch}, loader '{context.dataloader_name}', "
        place += f"batch {context.batch_idx}"
        problem = self._plan.loss_check.check(loss, place)
        if isinstance(problem, TrainingError):
            return problem
        if problem:
            self.skip_optimizer_step(None, problem)
            self._drops_gradients = True  # those that wait for their optimizer are not finite
        return None

    def _run_step(self) -> None:
        """Step with every optimizer that is due."""
        loop, fire, plan, strategy = self.loop, self._dispatchers, self._plan, self.strategy
        context, requests, schedulers = loop.context, loop.requests, plan.schedulers
        multi_rank = loop.ranks.is_distributed
        if multi_rank and plan.has_optimizer_schedule:  # gradients are those of all ranks
            (self._drops_gradients,) = strategy.processes.any(self._drops_gradients)
        if schedulers:
            context.used_lr = context.read_lr()  # schedulers change it before hooks read it
        if plan.has_optimizer_schedule:  # the gradients of those that are not due accumulate
            self.epoch_progress.round += 1
            plan.due = [
                (idx, optimizer)
                for idx, optimizer in enumerate(self.optimizers)
                if self.epoch_progress.round % plan.optimizer_every[idx] == 0
            ]
        agreed = context.norm_is_agreed  # a norm of sharded gradients takes all ranks
        asks = fire.on_step_end is not None if agreed is None else agreed
        wants_norm = asks and not plan.clips
        context.skipped = True
        for idx, optimizer in plan.due:
            context.optimizer_idx = idx
            if plan.autocasts:
                strategy.unscale(optimizer)
            if fire.on_gradients_ready is not None:
                fire.on_gradients_ready(context)
            if fire.update is not None:
                fire.update(context)
                context.made_gradients = None  # frees them
            if plan.clips:
                self._clip(optimizer)
            if fire.on_before_optimizer_step is not None:
                fire.on_before_optimizer_step(context)
            reason = self._skip_reason(idx) if multi_rank or requests.pending else ""
            if wants_norm:
                context.keep_norm(idx)
            if not reason and not strategy.step(optimizer):
                reason = "the scaler found non-finite gradients"
            if reason:
                context.reason = reason
                loop.record.step_skipped(context.step, reason, idx)
                if fire.on_step_skipped is not None:
                    fire.on_step_skipped(context)
                continue
            context.skipped = False
            if wants_norm:
                context.note_step(idx)
            if fire.on_after_optimizer_step is not None:
                fire.on_after_optimizer_step(context)
            if schedulers:
                for scheduler in schedulers[idx]:
                    scheduler.step()
        if plan.autocasts:
            due = [optimizer for _, optimizer in plan.due]
            strategy.end_step(o for o in self.optimizers if o not in due)
        if plan.clips:
            self._combine_norms()
        if multi_rank or requests.pending:
            requests.skips.clear()
        if not context.skipped:
            context.step += 1

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        context, plan = self.loop.context, self._plan
        norm = self.strategy.clip(optimizer, plan.clip_norm, plan.clip_value)
        context.clipped_norm = norm
        self._norms.append(norm)
        if self._dispatchers.on_gradient_clip is not None:
            self._dispatchers.on_gradient_clip(context)

    def _combine_norms(self) -> None:
        """Combine the norms of the optimizers' gradients into the norm of all gradients."""
        if len(self._norms) > 1:
            self.loop.context.clipped_norm = torch.linalg.vector_norm(torch.stack(self._norms))
        self._norms.clear()

    def _skip_reason(self, idx: int) -> str:
        """Return why this optimizer does not step, on any rank; "" if it does."""
        reason = self.loop.requests.why_skipped(idx)
        (skip,) = self.strategy.processes.any(bool(reason))
        return reason or ("another process asked" if skip else "")

    def _end_step(self) -> None:
        """Fire on_step_end, record the loss, and zero the gradients that were used."""
        loop, fire, losses = self.loop, self._dispatchers, self._losses
        context, record = loop.context, loop.record
        loss = losses[0] if len(losses) == 1 else mean_loss(losses)
        if context.norm_is_agreed:
            context.prepare_norm()
        if fire.on_step_end is not None:
            context.loss = LazyFloat(loss)
            fire.on_step_end(context)
        own_log = None if record.sink is None else record.sink.log
        log_value = loop.ranks.records.add if loop.ranks.is_distributed else own_log
        if log_value is not None:
            log_value(context.step, context.epoch, "train/loss", loss)
            for name, value in mean_metrics(self._metrics).items():
                log_value(context.step, context.epoch, f"train/{name}", value)
        context.norms.clear()
        used = self.optimizers if self._drops_gradients else [o for _, o in self._plan.due]
        for optimizer in used:
            zero_grad(optimizer)
        self._drops_gradients = False
        if loop.probes is not None:
            loop.probes.end_step()
        record.sample(context.step, context.epoch)
        losses.clear()
        self._metrics.clear()
        context.clipped_norm = context.agreed_norm = None
        context.step_in_progress = context.step + 1

    # -- between two steps ------------------------------------------------------------------------

    def _boundary(self, *, validate: bool | None = None) -> bool:
        """Validate if it is due (None: see the plan) and apply requests; return whether to stop."""
        loop, every, context = self.loop, self._plan.validate_every, self.loop.context
        if validate is None:
            validate = every is not None and not context.skipped and context.step % every == 0
        if validate and self.val_data is not None:
            self.epoch_progress.validation_due = True  # in a checkpoint saved before it ends
            self._validate_in_loop()
            self.epoch_progress.validation_due = False
        if loop.checkpoints.prepares:
            loop.checkpoints.prepare()
        if self.strategy.is_distributed and loop.ranks.records.is_due(context.step):
            loop.ranks.records.report(loop.record.sink)
        return self._apply_requests()

    def _apply_requests(self) -> bool:
        """Apply the requests of all ranks on all ranks; return whether to stop."""
        loop = self.loop
        if (reason := self.strategy.stop_reason()) is not None:
            self.stop(reason)
        agreed = loop.agree()
        if agreed.stop:
            self.stop("another process asked for it")  # the first reason is kept
        stop = agreed.stop or loop.context.step >= self._plan.limit
        if agreed.signal and not stop:  # training that stops here ends in any case
            self._leave()
        if agreed.save:
            self._save_requested()
        if loop.probes is not None and loop.probes.waiting:
            loop.sync_probes(at_boundary=True)
        checkpoints = loop.checkpoints
        loop.requests.settle(saving=checkpoints.is_busy or checkpoints.prepares)
        return stop

    # -- validation -------------------------------------------------------------------------------

    def validate(self, loaders: Any = None) -> Metrics:
        """Validate, and return the metrics: means, weighted by the sizes of the batches.

        The model's mode, the random states and the batch in the context do not change.
        """
        require_all_processes(self, "trainer.validate()")
        stream = self.val_data
        if loaders is not None:
            stream = self._make_stream(loaders, "val")
        metrics = self._validation.run(stream)
        assert metrics is not None  # only a signal would end it, and nothing looks for signals
        self._display.validation(metrics, self.epoch, self.step)
        return metrics

    def _validate_in_loop(self) -> None:
        """Validate, unless a signal ends it: then save the state from before it, and leave."""
        assert self.val_data is not None
        loop = self.loop
        if self.strategy.is_distributed:  # before the values of the validation
            loop.ranks.records.report(loop.record.sink)
        before = loop.state.copy("hooks", "attributes", "run")  # which hooks may change
        generators = [(g, generator_state(g)) for g in generators_of(self.val_data.loaders)]
        phase, loop.phase = loop.phase, Phase.IN_STEP  # checkpoints wait for its end
        try:
            metrics = self._validation.run(self.val_data, until_signal=True)
        except RuntimeError as error:
            if not has_ended_workers(error, loop.requests):
                raise
            metrics = None
        loop.phase = phase
        if metrics is not None:
            self._display.validation(metrics, self.epoch, self.step)
            return
        for generator, saved in generators:  # undo it: it is repeated after resuming
            set_generator_state(generator, saved)
        for name in self.hooks:
            cancel = getattr(self.hooks.get_hook(name), "cancel_validation", None)
            if cancel is not None:
                cancel()
        loop.state.overrides = before()
        self._leave()

    # -- signals ----------------------------------------------------------------------------------

    def _leave(self, *, can_save: bool = True) -> Never:
        """Save because of a signal if the last step is complete, and raise."""
        received = save_for_signal(self, self._display.say, can_save=can_save)
        self.stop_signal = received.name
        if received is signal.SIGINT:
            raise KeyboardInterrupt
        self.loop.requests.stop(received.name)
        requeue(self)  # now: what hooks do at the end may take long
        raise Preempted

    def _check_late_signal(self) -> None:
        """Pass on a signal that came when training was ending in any case."""
        received = self.loop.requests.signal
        if received is None or self.stop_signal is not None:
            return
        self.stop_signal = received.name
        if received is signal.SIGINT:
            raise KeyboardInterrupt
        log.warning(
            "%s came when training was ending with the status '%s'. `trainer.stop_signal` has its "
            "name: a script that continues should end soon.",
            received.name,
            self.status,
        )

    # -- the end ----------------------------------------------------------------------------------

    def _leave_in_fork(self) -> None:
        self._display = make_progress("off")

    def _fail(self, error: BaseException) -> None:
        loop = self.loop
        if loop.is_forked:
            return
        self._set_failed(error)
        if self.strategy.is_distributed:
            self.strategy.processes.report_error(error)
        has_started = loop.phase not in (Phase.IDLE, Phase.STARTING)
        if has_started:
            try:
                loop.fire("on_exception")
            except HooklineError:  # the first error matters more, and is raised
                log.exception("A hook failed in on_exception.")
        if has_started and isinstance(error, Exception) and self.config.checkpoints.on_crash:
            save_after_crash(self)

    def _set_failed(self, error: BaseException) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        self.loop.context.status = "interrupted" if interrupted else "error"
        self.loop.context.exception = error

    def _end(self) -> None:
        loop, phase = self.loop, self.loop.phase
        context, requests = loop.context, loop.requests
        if phase is Phase.IDLE or loop.is_forked:
            return
        failed = context.status in ("error", "interrupted")
        together = not failed and self.strategy.is_distributed and phase is not Phase.STARTING
        if together:
            loop.ranks.records.report(loop.record.sink)
            (stopped,) = self.strategy.processes.any(requests.stop_reason is not None)
            if stopped:
                self.stop("another process asked for it")  # the first reason is kept
        if context.status == "training":
            context.status = "completed" if requests.stop_reason is None else "stopped"
        if requests.checkpoints:
            log.warning(
                "A checkpoint that was asked for at step %d was not saved, because training ended "
                "within a step. To save the state after an exception, set checkpoints.on_crash.",
                self.step,
            )
        try:
            try:
                if loop.has_checkpoints:
                    loop.checkpoints.finish(failed=failed)
                if together:
                    loop.checkpoints.broadcast_saved()
                    broadcast_buffers(self.model)
            except BaseException as error:  # hooks are told that training ends in any case
                together = False
                self._set_failed(error)
                raise
            finally:
                loop.phase = Phase.IDLE
                self._watch_model()
                if together:
                    loop.checkpoints.serve_end(lambda: loop.fire("on_train_end"))
                elif phase is not Phase.STARTING:
                    loop.fire("on_train_end")
        except BaseException as error:
            if not failed or not isinstance(error, HooklineError):
                self._set_failed(error)
                raise
            log.exception("A hook failed in on_train_end.")
        finally:
            loop.phase = Phase.IDLE
            loop.state.overrides = {}
            with HeldInterrupts(), ExitStack() as steps:
                # Called from the last to the first, each also if another one fails.
                steps.callback(loop.stay_in_forks)
                steps.callback(self._end_record)
                steps.callback(self.hooks.run_ended)
                steps.callback(loop.sync_probes)
                steps.callback(self._watch_model)
                steps.callback(loop.close_checkpoints)
                steps.callback(self._unwrap_model)

    def _unwrap_model(self) -> None:
        self._called_model = self.model
        self.strategy.unwrap()

    def _end_record(self) -> None:
        """End the progress and the run, which also have what the hooks did."""
        loop, context = self.loop, self.loop.context
        summary = self.hooks.summary()
        try:
            with AllowedInterrupts():  # it may wait for the other processes
                summary = summarize_hooks(self)
        finally:
            reasons = [text for text in (self.stop_reason, loop.record.problem()) if text]
            self._display.end(context.status, summary, "; ".join(reasons))
            reason, error = loop.requests.stop_reason, context.exception
            loop.record.close(context.status, reason, summary, error, self.step, context.epoch)

    # -- a loop of the user's own -----------------------------------------------------------------

    def training_step(self, batch: Any) -> float:
        """Train on one batch, and step when it completes a step; return the batch's loss.

        For users who write the loop themselves. The first call starts the run; `finish()` ends it.
        This waits for the device.
        """
        try:
            if self.loop.phase is Phase.IDLE:
                self.loop.requests = ControlRequests()
                self._begin(None)
                self._epoch_length = None
                self.loop.fire("on_epoch_start")
            self._run_batches([(batch, self.position.batches, 0, "train")], None)
            return float(self.loop.context.latest_loss)
        except BaseException as error:
            self._fail(error)
            self._end()
            raise

    def finish(self, status: str = "completed") -> None:
        """End a run that was driven by `training_step`: finish its last step, end the epoch."""
        if self.loop.phase is Phase.IDLE:
            return
        context = self.loop.context
        try:
            if self._losses:
                self._finish_step()
            self._plan.loss_check.finish()
            context.event_metrics = Metrics(context.means.means())
            self.loop.fire("on_epoch_end")
            context.status = status
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._end()
        write_report(self, self._display.say)

    def _finish_step(self) -> None:
        """Step with the batches that are there, as if the step had been that small."""
        factor = self._plan.accumulate / len(self._losses)
        for optimizer, every in zip(self.optimizers, self._plan.optimizer_every, strict=True):
            for parameter in parameters_of(optimizer) if every == 1 else ():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.loop.phase = Phase.IN_STEP
        self.strategy.begin_batch(completes_step=True, sync=True)
        self._run_step()
        self._end_step()
        self._boundary()
        self.loop.phase = Phase.BETWEEN_STEPS


class _StepPlan:
    """Settings of a run as plain attributes: those of the configuration are slow to read."""

    def __init__(self, trainer: Trainer) -> None:
        config, strategy, optimizers = trainer.config, trainer.strategy, trainer.optimizers
        self.accumulate = config.accumulate  # batches in a step
        self.limit = math.inf if config.max_steps is None else config.max_steps
        self.validate_every = config.validate_every_steps
        self.optimizer_every = config.optimizer_every or [1] * len(optimizers)
        self.has_optimizer_schedule = any(n > 1 for n in self.optimizer_every)
        self.due = list(enumerate(optimizers))  # those that step in this step, by number
        self.schedulers: list[list[Any]] = []  # of each optimizer, stepped after it
        if trainer.schedulers and config.scheduler_every == "step":
            self.schedulers = [
                [
                    strategy.stepped_scheduler(scheduler)
                    for scheduler in trainer.schedulers
                    if scheduler.optimizer is optimizer and not needs_metric(scheduler)
                ]
                for optimizer in optimizers
            ]
        self.autocasts = config.precision != "fp32"
        self.clip_norm, self.clip_value = config.clip_norm, config.clip_value
        self.clips = config.clip_norm is not None or config.clip_value is not None
        self.reads_at_once = strategy.device.type == "cpu"  # there is no device to wait for
        self.loss_check = LossCheck(config.on_nan, deferred=not self.reads_at_once)
        self.multi_loader = trainer.train_data is not None and len(trainer.train_data.names) > 1
