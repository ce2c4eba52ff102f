"""What a trainer consists of, and what users and hooks call on it. Its loop is in `trainer`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any, Literal, Never, get_args

import torch

from hookline.arguments import (
    check_function,
    check_name,
    listed_strings,
    show_value,
)
from hookline.config.hook_items import make_hook, split_hooks
from hookline.config.registry import HookRegistry
from hookline.config.trainer_config import HooksConfig, TrainerConfig, checked_hparams
from hookline.dispatch import HookManager
from hookline.errors import RunError, TrainingError, listed
from hookline.hook import Hook
from hookline.loop.control_requests import ControlRequests
from hookline.loop.evaluation import count_tokens, make_counter
from hookline.loop.hook_agreement import HookAgreement
from hookline.loop.loop_monitor import LoopMonitor
from hookline.loop.means import Means, means_of_all
from hookline.loop.model_watch import ModelWatch
from hookline.loop.phase_times import PhaseTimes
from hookline.loop.rank_metrics import RankMetrics
from hookline.loop.step_records import StepRecords
from hookline.loop.training_loop import TrainingLoop
from hookline.runs.recorder import Recorder
from hookline.runs.run import Kind
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
