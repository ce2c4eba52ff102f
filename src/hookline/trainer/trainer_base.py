"""What a trainer consists of, and what users and hooks call on it. Its loop is in `trainer`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any, Literal, Never, get_args

import torch

from hookline.arguments import (
    check_function,
    check_mapping,
    check_name,
    listed_strings,
    show_value,
)
from hookline.config.hook_items import make_hook, split_hooks
from hookline.config.registry import HookRegistry
from hookline.config.trainer_config import HooksConfig, TrainerConfig, checked_hparams
from hookline.context import LazyFloat, Metrics
from hookline.dispatch import HookManager
from hookline.errors import CheckpointError, RunError, TrainingError, listed
from hookline.hook import Hook
from hookline.loop.control_requests import ControlRequests
from hookline.loop.evaluation import count_tokens, evaluation, make_counter, samples_in
from hookline.loop.hook_agreement import HookAgreement
from hookline.loop.loop_monitor import LoopMonitor
from hookline.loop.means import Means, means_of_all
from hookline.loop.model_watch import ModelWatch
from hookline.loop.phase_times import PhaseTimes
from hookline.loop.rank_metrics import RankMetrics
from hookline.loop.step_records import StepRecords
from hookline.loop.training_loop import TrainingLoop
from hookline.loop.weight_sharing import share_buffers
from hookline.runs.recorder import Recorder
from hookline.runs.run import Kind
from hookline.tensors.sharded import shard_like
from hookline.trackers.tracker_set import make_tracker_set
from hookline.trainer.checks import (
    check_arguments,
    check_gradient,
    checked_config,
    checked_model,
    checked_optimizers,
    device_for,
    match_schedulers,
)
from hookline.trainer.data_position import DataPosition
from hookline.trainer.data_stream import Stream
from hookline.trainer.losses import LossComputer
from hookline.trainer.progress import make_progress
from hookline.trainer.rank_checks import require_all_processes
from hookline.trainer.sharded_loader import share_loaders
from hookline.trainer.strategies import choose_accelerate, make_strategy, parameters_of
from hookline.trainer.trainer_context import TrainerEventContext
from hookline.updates import Identity

__all__ = ["Phase", "TrainerBase"]

log = logging.getLogger("hookline")
_KINDS = get_args(Kind)


class Phase(Enum):
    """What a trainer is doing."""

    IDLE = auto()  # there is no run
    STARTING = auto()  # a run begins; hooks have not been called yet
    BETWEEN_STEPS = auto()  # at a step boundary: checkpoints are saved at once
    IN_STEP = auto()  # within a step or the end of an epoch: checkpoints wait for its end


class TrainerBase(TrainingLoop[HookRegistry]):
    """The parts of a trainer, and its public methods apart from the loop."""

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
        hooks: Iterable[Hook] | HookManager | Mapping[str, Any] = (),
        hparams: Mapping[str, Any] | None = None,
        name: str | None = None,
        tags: Iterable[str] = (),
        accelerator: Any = None,
        trackers: Any = (),
        **unknown: Never,
    ) -> None:
        counts_itself = isinstance(tokens_fn, str) and tokens_fn == "auto"
        count: Any = None if counts_itself else tokens_fn
        functions = {"loss_fn": loss_fn, "step_fn": step_fn, "tokens_fn": count}
        check_arguments(config, model, optimizers, unknown, **functions)
        fields, listed_hooks = split_hooks(config)
        self.config = checked_config(fields)
        device = device_for(self.config.device, checked_model(model))
        if self._needs_accelerate or accelerator is not None:
            self.config = choose_accelerate(self.config)
        self.strategy = make_strategy(self.config, device, accelerator)
        self.config = self.strategy.complete_config(self.config)
        self.accelerator = self.strategy.accelerator
        self.device = self.strategy.device
        self.model, self.optimizers = self.strategy.prepare(
            model, checked_optimizers(optimizers, model, self.config.optimizer_every)
        )
        self._called_model = self.model  # what the loop calls: the strategy may wrap the model
        self._step_records = StepRecords(self.strategy.processes)
        self._rank_metrics = RankMetrics(self.strategy.processes.rank, self.device)
        self.schedulers = match_schedulers(
            self.strategy.unwrap_schedulers(schedulers), self.optimizers
        )
        self.best_accuracy = 0.0
        self._loss_computer = LossComputer(step_fn, loss_fn, self.announce)
        self._count_tokens = count_tokens if counts_itself else count and make_counter(count)
        self.hparams = checked_hparams(hparams)
        if name is not None:
            check_name("Trainer(…, name=…)", name)
        self.name = name
        self.tags = listed_strings("Trainer(…, tags=…)", tags)
        self._phase = Phase.IDLE
        self._requests = ControlRequests()
        self._trackers = make_tracker_set(trackers)
        if self._trackers is not None:
            self._trackers.is_signalled = lambda: self._requests.signal is not None
        self._recorder = Recorder(None)
        self._monitor: LoopMonitor | None = None  # of a run that is written
        self._phases = PhaseTimes()
        self._progress = make_progress("off")
        self.train_data: Stream | None = None
        self.val_data: Stream | None = None
        self._position = DataPosition()
        self._epoch_length: int | None = None  # in batches; None if it is not known
        self._accumulated_losses: list[Any] = []  # of the batches in the next optimizer step
        self._accumulated_metrics: list[Mapping[str, Any]] = []
        self._norms: list[torch.Tensor] = []  # gradient norms of the optimizers in this step
        self._drops_gradients = False  # whether this step leaves none, also for later steps
        self._optimizer_round = 0  # counts steps, to choose the optimizers that are due
        self._seeds_samples = False
        self._settings: dict[str, Any] = {}  # those that a checkpoint is compared with
        self._batch_to_repeat: Any = None
        self._hooks_toggled = False  # whether hooks were toggled since the processes agreed
        self._is_ending = False  # whether several processes call their hooks for on_train_end
        self._rank_states: list[Any] | None = None  # of all processes, for a checkpoint
        self._sanity_due = False  # whether the validation before training has not ended yet
        self._validation_due = False  # the same for a validation between two steps
        self._last_epoch = 0  # the epoch of the checkpoint that was loaded
        self._epoch_started = False  # whether on_epoch_start was fired for the current position
        self._epoch_over = False  # whether on_epoch_end was fired for the current position
        self._stop_signal: str | None = None
        self._run_position: Any = None  # of the metrics log, in the checkpoint that was loaded
        self._before_validation: dict[str, Any] = {}  # the state before one that was canceled
        self._context: TrainerEventContext = TrainerEventContext(self, self.model, self.optimizers)
        self._watch = ModelWatch(self.model, self._before_forward, self._after_forward)
        configured, given = (hooks, ()) if isinstance(hooks, Mapping) else (None, hooks)
        self.hooks = HookRegistry(self.config.hooks, hooks=given, source=self._context)
        self.hooks.add_configured(listed_hooks)
        self.hooks.add_configured(configured)
        self.hooks.add_default(Identity())
        self._dispatchers = self.hooks.dispatchers
        processes = self.strategy.processes
        self.hooks.set_process(is_main=processes.is_main, is_local_main=processes.is_local_main)
        self._hook_agreement = HookAgreement(self.hooks, processes)
        self.hooks.on_change = self._hooks_changed
        self.hooks.failures.on_failure = self._hook_failed
        self._hooks_changed()

    # -- data and loss ----------------------------------------------------------------------------

    def set_data(self, loaders: Any, val_loaders: Any = None) -> None:
        """Set the data to train and to validate on, as for `fit`.

        Without `loaders`, the data to train on stays; without both, also that to validate on.
        """
        if loaders is not None:
            self.train_data = Stream(
                self._share(loaders, "train"), self.config.loaders, what="train"
            )
        if loaders is not None or val_loaders is not None:
            self.val_data = None
            if val_loaders is not None:
                self.val_data = self._val_stream(val_loaders)
        if self.train_data is None:
            raise TrainingError("There is no data to train on. Give a loader: fit(loader).")

    def _val_stream(self, loaders: Any) -> Stream:
        """Return the data to validate on; one of several processes may have none of it."""
        shared = self._share(loaders, "val")
        return Stream(shared, what="val", may_be_empty=not self.strategy.alone)

    def _share(self, loaders: Any, what: str) -> Any:
        """Return the loaders with the share of this process in their batches."""
        if self.strategy.alone or not self.config.shard_loaders:
            return loaders
        return share_loaders(loaders, self.strategy.processes, what, fill=what == "train")

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
        context, watch = self._context, self._watch
        evaluating, context.evaluating = context.evaluating, True
        watch.is_paused = True
        try:
            return self.compute_loss(batch)[0]
        finally:
            context.evaluating, watch.is_paused = evaluating, False

    def sample_indices(self, loader_idx: int, batch_idx: int) -> Any:
        """Return the indices of a train loader's latest batch in its dataset; None if unknown."""
        return self._position.sample_indices(loader_idx, batch_idx)

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

    def validate(self, loaders: Any = None) -> Metrics:
        """Validate, and return the metrics: means, weighted by the sizes of the batches.

        The model's mode, the random states and the batch in the context do not change.
        """
        require_all_processes(self, "trainer.validate()")
        stream = self.val_data
        if loaders is not None:
            stream = self._val_stream(loaders)
        metrics = self._validate(stream)
        assert metrics is not None  # only a signal would end it, and nothing looks for signals
        return metrics

    def _validate(self, stream: Stream | None, *, until_signal: bool = False) -> Metrics | None:
        """Validate and return the metrics; None if a signal has ended it."""
        if stream is None:
            raise TrainingError("There is no data to validate on. Give val_loaders to fit().")
        with self._phases.span("validation"):
            return self._run_validation(stream, until_signal=until_signal)

    def _run_validation(self, stream: Stream, *, until_signal: bool) -> Metrics | None:
        context, fire = self._context, self._dispatchers
        is_canceled = False
        train_batch = context.batch, context.batch_idx
        train_loader = context.dataloader_idx, context.dataloader_name
        means = Means()
        if not self.strategy.alone:
            share_buffers(self.model)  # those of rank 0, which checkpoints have
        context.evaluating = True
        with evaluation(self.model, self.device):
            if fire.on_validation_start is not None:
                fire.on_validation_start(context)
            for loaded, signaled in self._validation_batches(stream, until_signal):
                if signaled:
                    is_canceled = True
                    break
                if loaded is None:  # only other processes have a batch
                    if self.strategy.forward_is_collective:
                        self.compute_loss(self._batch_to_repeat)
                    continue
                batch, batch_idx, loader_idx, loader_name = loaded
                context.batch, context.batch_idx = batch, batch_idx
                context.dataloader_idx, context.dataloader_name = loader_idx, loader_name
                context.made_metrics = None
                if fire.on_validation_batch_start is not None:
                    fire.on_validation_batch_start(context)
                loss, extra = self.compute_loss(batch)
                weight = float(samples_in(batch))
                for name, value in {"loss": loss, **extra}.items():
                    means.add(f"val/{name}", value, weight)
                    if len(stream.names) > 1:
                        means.add(f"val/dl_{loader_name}/{name}", value, weight)
                if fire.on_validation_batch_end is not None:
                    context.loss, context.extra = LazyFloat(loss.detach()), dict(extra)
                    fire.on_validation_batch_end(context)
            context.made_metrics = metrics = Metrics(self._means_of_all(means))
            if fire.on_validation_end is not None and not is_canceled:
                fire.on_validation_end(context)
        context.evaluating = False
        context.batch, context.batch_idx = train_batch
        context.dataloader_idx, context.dataloader_name = train_loader
        if is_canceled:
            return None
        self._position.validated = dict.copy(metrics)
        self._recorder.metrics(context.step, context.epoch, metrics)
        self._progress.validation(metrics, context.epoch, context.step)
        if "val/accuracy" in metrics:
            self.best_accuracy = max(self.best_accuracy, float(metrics["val/accuracy"]))
        return metrics

    def _validation_batches(self, stream: Stream, until_signal: bool) -> Iterator[tuple[Any, bool]]:
        """Iterate over batches, each with whether a signal in any process ends the validation.

        A batch is None while only other processes have more. The processes agree on signals: one
        that comes right after an agreement waits for the next, or this process would end alone.
        """
        requests = self._requests
        if self.strategy.alone:
            for batch in stream.tuples():
                yield batch, until_signal and requests.signal is not None
            return
        is_empty = True
        self._batch_to_repeat = None
        for batches in stream.tuples_by_loader():  # all processes begin each loader together
            while True:
                loaded: Any = None
                has_ended = False  # whether the signal has also ended the workers of the loader
                try:
                    loaded = next(batches, None)
                except RuntimeError as error:
                    if not until_signal or not self._ended_workers(error):
                        raise
                    has_ended = True
                signal_came = until_signal and requests.signal is not None
                more, signaled = self.strategy.any_rank(
                    loaded is not None or has_ended, signal_came
                )
                if not more:
                    break
                is_empty = False
                if self.strategy.forward_is_collective and not signaled:
                    self._keep_batch_to_repeat(loaded)
                yield loaded, signaled
        if is_empty:
            raise TrainingError("The validation loaders gave no batch in any process.")

    def _ended_workers(self, error: RuntimeError) -> bool:
        """Return whether a signal to all processes of the job has ended a loader's workers."""
        return self._requests.signal is not None and "DataLoader worker" in str(error)

    def _keep_batch_to_repeat(self, loaded: Any) -> None:
        """Keep a batch for when this process has none and others call the model."""
        if loaded is not None:
            self._batch_to_repeat = loaded[0]
        has_none = loaded is None and self._batch_to_repeat is None
        (missing,) = self.strategy.any_rank(has_none)
        if missing:
            kept = self.strategy.processes.gather(self._batch_to_repeat)
            if self._batch_to_repeat is None:
                self._batch_to_repeat = next(batch for batch in kept if batch is not None)

    def _means_of_all(self, means: Means) -> dict[str, Any]:
        """Return means over all processes, which all have to call this."""
        return means_of_all(means, self.strategy.processes)

    def announce(self, text: str) -> None:
        """Tell users something: in the log if it is configured, else with the progress."""
        if not self.strategy.is_main:
            return
        if log.isEnabledFor(logging.INFO):
            log.info(text)
        else:
            self._progress.say(text)

    # -- where training stands --------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._context.epoch

    @property
    def tokens_seen(self) -> int:
        """The number of tokens trained on; 0 where it is not known."""
        return self._context.counted_tokens

    @property
    def known_tokens(self) -> int | None:
        """The number of tokens trained on; None where it is not known."""
        unknown = self._count_tokens is None or self._context.tokens_unknown
        return None if unknown else self._context.counted_tokens

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
        return self._requests.stop_reason

    @property
    def stop_signal(self) -> str | None:
        """The signal that asked the last run to end, such as "SIGTERM"; None if none did."""
        return self._stop_signal

    @property
    def run(self) -> Any:
        """The run and its folder; None if no run is written."""
        return self._context.run

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled: it has open files, loaders and "
            "hooks on the model. Save the run with `trainer.save_checkpoint(path)`, which "
            "`fit(resume_from=path)` continues, or the weights with `trainer.model.state_dict()`."
        )

    # -- requests ---------------------------------------------------------------------------------

    def stop(self, reason: str = "") -> None:
        """Stop training after this step."""
        is_first = self._requests.stop_reason is None
        self._requests.stop(reason)
        if is_first:
            self._recorder.stop_requested(self._context.step, self._requests.stop_reason)

    @property
    def should_stop(self) -> bool:
        """Whether training stops after this step; setting it is the same as `stop()`."""
        return self._requests.stop_reason is not None

    @should_stop.setter
    def should_stop(self, should_stop: bool) -> None:
        if should_stop:
            self.stop("trainer.should_stop was set")
        else:
            self._requests.stop_reason = None

    def _request_skip(self, idx: int, reason: str) -> None:
        self._requests.skip(idx, reason)

    # -- logging ----------------------------------------------------------------------------------

    def log(self, name: str, value: Any, kind: Kind = "scalar") -> None:
        """Record a value with this step: a scalar, histogram, text or image, as `kind` says."""
        texts: Any = name, kind
        if type(texts[0]) is not str or type(texts[1]) is not str or kind not in _KINDS:
            check_name("trainer.log(name)", name)
            if not isinstance(kind, str) or kind not in _KINDS:
                raise RunError(f"Unknown kind {show_value(kind)}. There are {listed(_KINDS)}.")
        self._recorder.value(self._context.step, self._context.epoch, name, value, kind)

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

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, apart from the model's weights."""
        context, scaler = self._context, self.strategy.scaler
        return {
            "classes": {
                "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
                "schedulers": [type(scheduler).__name__ for scheduler in self.schedulers],
            },
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if scaler is None else scaler.state_dict(),
            "hooks": self.hooks.state_dict(),
            "attributes": self._attribute_states(),
            "disabled": [info.name for info in self.hooks.describe() if info.status == "disabled"],
            "position": self._position.state_dict(self.device),
            "means": context.means.state_dict(),
            "step": context.step,
            "epoch": context.epoch,
            "round": self._optimizer_round,
            "pending_gradients": self._pending_gradients(),
            "tokens_seen": context.counted_tokens,
            "best_accuracy": self.best_accuracy,
            "sanity_due": self._sanity_due,
            "validation_due": self._validation_due,
            "epoch_started": self._epoch_started,
            "epoch_over": self._epoch_over,
            "run": self._recorder.position(),
            "settings": self._settings,
            "ranks": self._rank_states,
            "strategy": self.strategy.state(),
            **self._before_validation,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: the run cannot be resumed exactly with this trainer's data.
        """
        state = check_mapping("load_state_dict(state)", state)
        if "optimizers" not in state or "position" not in state:
            raise CheckpointError("load_state_dict(state) takes what state_dict() returned.")
        context, scaler = self._context, self.strategy.scaler
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            self.strategy.load_optimizer(optimizer, saved)
            # Else a scheduler that steps before the next optimizer step warns about their order.
            optimizer._opt_called = state["step"] > 0  # type: ignore[attr-defined]
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if scaler is not None and state["scaler"] is not None:
            scaler.load_state_dict(state["scaler"])
        self.hooks.load_state_dict(state["hooks"])
        self._load_attribute_states(state["attributes"])
        self.strategy.load_state(state.get("strategy", {}))
        for name in state["disabled"]:
            if name in self.hooks:
                self.hooks.disable_hook(name)
        context.step, context.step_in_progress = state["step"], state["step"] + 1
        context.counted_tokens = state["tokens_seen"]
        self._optimizer_round = state["round"]
        self._load_pending_gradients(state["pending_gradients"])
        context.means.load_state_dict(state["means"])
        self.best_accuracy = state["best_accuracy"]
        self._sanity_due, self._validation_due = state["sanity_due"], state["validation_due"]
        self._epoch_started = state.get("epoch_started", False)
        self._epoch_over, self._run_position = state["epoch_over"], state.get("run")
        self._position.load_state_dict(state["position"], self.device)
        finished = self._position.epoch == self.max_epochs or context.step == self.config.max_steps
        self._last_epoch = state["epoch"]
        context.epoch = self._last_epoch if finished else self._position.epoch

    def _rank_state(self) -> dict[str, Any]:
        """Return the part of the state that each process has of its own."""
        return {
            "position": self._position.state_dict(self.device),
            "means": self._context.means.state_dict(),
            "tokens_seen": self._context.counted_tokens,
        }

    def _pending_gradients(self) -> list[list[Any] | None]:
        """Return the gradients of each optimizer that does not step in every step, else None."""
        every = self.config.optimizer_every or [1] * len(self.optimizers)
        return [
            None if n == 1 else [p.grad for p in parameters_of(optimizer)]
            for optimizer, n in zip(self.optimizers, every, strict=True)
        ]

    def _load_pending_gradients(self, saved: list[list[Any] | None]) -> None:
        for optimizer, gradients in zip(self.optimizers, saved, strict=True):
            if gradients is not None:
                for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
                    parameter.grad = None
                    if gradient is not None:
                        parameter.grad = shard_like(gradient.to(parameter.device), parameter)

    # -- agreement of the processes ---------------------------------------------------------------

    def _hooks_changed(self) -> None:
        super()._hooks_changed()
        if not self.strategy.alone and (self._phase is not Phase.IDLE or self._is_ending):
            self._hooks_toggled = True

    def _agree_on_hooks(self) -> None:
        """Enable and disable hooks as they were in any process since the last agreement."""
        self._hook_agreement.apply_toggles()
        self._hooks_toggled = False
        self._context.agree_on_norm(self.hooks, self.strategy.processes)

    # -- hooks and probes -------------------------------------------------------------------------

    def _watch_model(self) -> None:
        fire = self._dispatchers
        watched = (fire.on_before_forward, fire.on_after_forward, fire.forward)
        self._watch.watch(calls=self._phase is not Phase.IDLE and any(watched), backward=False)

    def _sync_probes(self, *, at_boundary: bool = False) -> None:
        super()._sync_probes(at_boundary=at_boundary)
        if self._probes is not None:
            self._requests.pending |= self._probes.waiting

    def _probe_phase(self) -> tuple[bool, bool]:
        return self._phase is not Phase.IDLE, self._phase is Phase.IN_STEP
