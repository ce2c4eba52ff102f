"""LibrarySession: hooks in a loop that belongs to another library's trainer.

The trainer's callbacks tell it where training is, and PyTorch's own hooks show the rest, as in a
bare loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import Signals
from types import SimpleNamespace
from typing import Any, Self

import torch

from hookline.context import LazyFloat, to_float
from hookline.errors import HooklineError, LoopError, NotProvidedError
from hookline.integrations.bare_loop.loop_phases import Batch
from hookline.integrations.bare_loop.session import Session, is_single_number
from hookline.integrations.library import Library, with_common_names
from hookline.interrupts import HeldInterrupts
from hookline.loop.means import Means
from hookline.loop.model_watch import ForwardTargets
from hookline.loop.processes import is_main_process, local_rank
from hookline.loop.signals import SignalWatch

log = logging.getLogger("hookline")


class LibrarySession(Session):
    """A session in the loop of a trainer, whose callbacks call the methods below.

    The model and the optimizers are given by `connect`, when the trainer has made them.

    Args:
        library: what the trainer gives to hooks.
        options: those of `attach`, checked.
        forwards_logs: whether numbers that hooks log are kept for the trainer (`take_logged`).
        batch_metrics: returns what was logged to the trainer in the training batch that ends, for
            hooks that ask for its metrics.
        on_log: called with the name and value of each number that is logged.
        before_state: called before the state of the hooks is collected.
        find_loaded_path: returns the path of the checkpoint that is read; None if unknown.

    Attributes:
        is_connected: whether the trainer has begun to train, and its model is watched.
        on_refusal: called with the error if training cannot start with these hooks, instead of
            raising it: the trainer goes on without them.
        ends_for_signal: whether training ends because a process has received a signal; None while
            it does not end.
    """

    _finds_batches = False

    def __init__(
        self,
        library: Library,
        options: SimpleNamespace,
        *,
        forwards_logs: bool = False,
        batch_metrics: Callable[[], Mapping[str, Any]] | None = None,
        on_log: Callable[[str, Any], None] | None = None,
        before_state: Callable[[], None] | None = None,
        find_loaded_path: Callable[[], Path | None] | None = None,
    ) -> None:
        no_model: Any = None  # it comes later
        super().__init__(no_model, [], [], None, options=options)
        self.library = library
        self.was_attached = False  # by `attach`, and not listed as a callback by the user
        self._allow_missing = options.allow_missing
        self._forwards_logs, self._on_log = forwards_logs, on_log
        self._before_state, self._loaded_path = before_state, find_loaded_path
        self._phases.other_metrics = batch_metrics
        self._logged_in_steps: dict[str, Any] = {}
        self._logged_otherwise: dict[str, Any] = {}  # at the end of an epoch or validation
        self.is_connected = False
        self._loaded: tuple[Path, Mapping[str, Any]] | None = None  # restored when it is connected
        self._known_before: tuple[int | None, int | None] = (None, None)  # before a validation
        self._unwatched: torch.optim.Optimizer | None = None  # that the user was told about
        self._has_told_signal = False
        self.ends_for_signal: bool | None = None
        self.on_refusal: Callable[[HooklineError], None] | None = None
        self._cleanup = ExitStack()
        self._requirements.provided |= library.provided
        self._requirements.calls = {**self._requirements.calls, **library.calls}
        self._refuse_missing()

    def _refuse_missing(self) -> None:
        """Raise for hooks that need events which the trainer does not give; or warn."""
        problems = [
            f"{', '.join(listeners)} needs {event}: {why}"
            for event, why in self.library.missing.items()
            if (listeners := self.hooks.listeners(event, needed=True))
        ]
        if problems and not self._allow_missing:
            raise NotProvidedError(
                f"Hooks need what {self.library.name} does not provide:",
                *(f"  - {problem}" for problem in problems),
                "Remove them, or attach with allow_missing=True: they are not called then.",
            )
        for problem in problems:
            log.warning("%s does not provide everything: %s", self.library.name, problem)

    # -- start and end ----------------------------------------------------------------------------

    @property
    def is_training(self) -> bool:
        """Whether the trainer trains with these hooks."""
        return self.started and not self.has_ended

    @property
    def is_validating(self) -> bool:
        """Whether a validation is in progress."""
        return self._phases.validation is not None

    def __enter__(self) -> Self:
        return self  # the trainer starts training

    def _end_after(self, error: BaseException | None) -> None:
        if self.is_connected:
            super()._end_after(error)
        elif not self.has_ended:  # it has not trained, and may do so later without these hooks
            self.abandon(error)

    def leave(self, error: BaseException | None = None) -> None:
        """End training, after this error, if there is one; unless the trainer has not begun."""
        if self.is_connected:
            self.__exit__(None if error is None else type(error), error, None)

    def begin(self) -> None:
        """Start training (`on_train_start`), when the trainer has started it."""
        if self.is_connected:
            super().begin()

    @contextmanager
    def starting(self) -> Generator[None]:
        """Start training in this block; see `on_refusal`."""
        try:
            yield
        except HooklineError as error:
            if self.on_refusal is None:
                raise
            if not self.has_ended:
                self.abandon(error)
            self.on_refusal(error)

    def connect(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        schedulers: Iterable[Any] = (),
        scaler: torch.amp.GradScaler | None = None,
        signals: Iterable[str] | None = (),
        called: ForwardTargets | None = None,
        ends_with_batch: bool = False,
        names: tuple[str, ...] = (),
    ) -> None:
        """Watch what the trainer trains; call `begin` when everything is restored.

        Training stops at SIGINT and these `signals`; None leaves signals alone. `called` is what
        the trainer calls, where this is not the model itself. With `ends_with_batch`, a batch ends
        a step in which some of the optimizers have not stepped. `names` are of the optimizers.
        """
        if self.is_connected or self.has_ended:
            raise LoopError(
                f"{self.library.name} has started a second training, and a session belongs to one. "
                "Attach again before each: `hookline.attach(trainer, …)`."
            )
        if signals is not None:  # first: from now on, Ctrl-C waits for the end of a step
            self._cleanup.enter_context(SignalWatch(self.loop.requests, signals))
        self.model, self.optimizers = model, optimizers
        self.schedulers, self.scaler = list(schedulers), scaler
        self.hooks.set_process(is_main=is_main_process(), is_local_main=local_rank() == 0)
        self.loop.context.connect(model, optimizers)
        self.loop.context.optimizer_names = names
        self._connect(called)
        self.is_connected = True
        self._watch.rule.ends_with_batch = ends_with_batch
        if self._allow_missing:
            self.allow_missing()

    def replace_equal(self, others: Iterable[LibrarySession]) -> None:
        """End the sessions of the same trainer that were attached by an equal call of `attach`."""
        for other in list(others):
            is_open = other.was_attached and not other.has_ended
            if is_open and self.describe() == other.describe():
                self.replace(other)
        self.was_attached = True

    def add_undo(self, step: Callable[[], None]) -> None:
        """Have this called when training ends, or cannot start; the latest is called first."""
        self._undo.callback(step)

    def abandon(self, error: BaseException | None) -> None:
        """Undo `attach` or `connect`, which has failed or was not used, without any event."""
        with HeldInterrupts():
            self._cleanup.close()
            super().abandon(error)

    def _leave_cycles(self) -> None:
        super()._leave_cycles()
        self._on_log = self._before_state = self._loaded_path = None

    def refuse(self, error: HooklineError) -> None:
        """Do nothing: the error leaves the trainer, and `leave` ends the session."""

    def _watch_termination(self) -> None:
        """Do nothing: the trainer's own handlers, or those of `connect`, see the signal."""

    def is_watched(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the steps of this optimizer are seen; if not, warn once.

        Raises:
            LoopError: There are updates, which the gradients of this optimizer do not get.
        """
        if optimizer in self.optimizers:
            return True
        if optimizer is not self._unwatched:
            self._unwatched = optimizer
            problem = (
                f"{self.library.name} steps with another optimizer ({type(optimizer).__name__}) "
                "than the one with which training has started, so hooks do not see its steps. "
                "Replace the optimizer before training starts."
            )
            if self.hooks.dispatchers.update is not None:
                raise LoopError(f"{problem} Updates of gradients would be left out.")
            log.warning("%s", problem)
        return False

    def use_config(self, config: Any) -> None:
        """Provide the trainer's configuration to hooks, unless the user has passed one."""
        if self.loop.context.known("config") is None:
            self.loop.context.config = self.config = config
            self._requirements.provided.add("config")

    def warn_about_copy(self) -> None:
        """Log that the copy of a trainer has no hooks, unless they are done anyway."""
        if not self.has_ended:
            log.warning(
                "The copy of %s has no hooks: they belong to one training run. Attach others, "
                "`hookline.attach(copy, …)`.",
                self.library.name,
            )

    def detach(self) -> None:
        """End training (`on_train_end`) and remove all hooks from the trainer's objects."""
        if self.has_ended:
            if self.loop.is_forked:
                self._cleanup.close()
            return
        try:
            if self.is_connected:
                super().detach()
            else:
                if self.status == "training":  # the trainer had nothing to train
                    self.loop.context.status = "completed"
                self.has_ended = True
                self._leave_loop()
        finally:  # until here, signals are only noted: the run is closed
            self._cleanup.close()
            self._phases.other_metrics = None
        name, ends_for_signal = self.received_signal, self.status in ("preempted", "interrupted")
        if name not in (None, "SIGINT") and not ends_for_signal:
            log.warning(
                "%s came when training was ending with the status '%s': a script that continues "
                "should end soon.",
                *(name, self.status),
            )

    def stop(self, reason: str = "") -> None:
        """Ask the trainer to end training after the step in progress; the first reason is kept."""
        if not self.is_connected:
            raise LoopError(f"{self.library.name} has not started training, so nothing can stop.")
        super().stop(reason)

    def preempt(self) -> None:
        """End training because of SIGTERM, which the trainer has handled."""
        if self.loop.requests.signal is None:
            self.loop.requests.receive_signal(Signals.SIGTERM)
        self._stop_because_of("SIGTERM")
        self.loop.context.status = "preempted"
        self.detach()

    def _stop_because_of(self, signal: str) -> None:
        self.loop.record.event("signal", step=self.step, signal=signal)
        self._ask_to_stop(signal)

    @property
    def received_signal(self) -> str | None:
        """The name of the signal that asked the process to end, such as `SIGTERM`."""
        received = self.loop.requests.signal
        return None if received is None else received.name

    def take_stop(self) -> bool:
        """Return whether the trainer should end training now: a hook or a signal asks for it.

        Several processes call this at the same places, and end training together.
        """
        requests = self.loop.requests
        if requests.signal is None and requests.stop_reason is None:
            return False
        if (name := self.received_signal) is not None and not self._has_told_signal:
            self._has_told_signal = True
            self._stop_because_of(name)
        if not self.should_stop:
            return False
        if self.ends_for_signal is None:
            self._agree_on_signal()
        return True

    def _agree_on_signal(self) -> None:
        """Find out in all processes whether a signal that one of them has received ends them."""
        name, ranks = self.received_signal, self.loop.ranks.processes
        self.ends_for_signal, is_interrupt = ranks.any(name is not None, name == "SIGINT")
        if self.ends_for_signal:
            self.loop.requests.end_for(Signals.SIGINT if is_interrupt else Signals.SIGTERM)
        if self.ends_for_signal and self.status == "training":
            self.loop.context.status = "interrupted" if is_interrupt else "preempted"

    @property
    def has_logged(self) -> bool:
        """Whether hooks have logged something that the trainer has not got."""
        return bool(self._logged_in_steps or self._logged_otherwise)

    # -- epochs, batches, steps -------------------------------------------------------------------

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0."""
        resumed = self._phases.resumed_epoch
        if resumed is not None and resumed < epoch:
            self.end_resumed_epoch()
        if resumed != epoch:
            self._batch_idx = 0
        self.reach_boundary()
        self._phases.begin_epoch(epoch)

    def end_resumed_epoch(self) -> None:
        """End an epoch that was saved after its last step: the trainer goes on with the next."""
        if self._phases.resumed_epoch is not None and self._batch_idx:
            self._phases.begin_epoch(self._phases.resumed_epoch)
            self.end_epoch()

    def end_epoch(self, metrics: Mapping[str, Any] | None = None) -> None:
        """End the epoch; `metrics` are the trainer's own."""
        found = with_common_names(metrics or {})
        found.pop("train/loss", None)  # its mean is that of the losses which backward ran on
        self.loop.context.validated |= found
        self._phases.set_batch(None)
        self._end_epoch()

    def start_batch(
        self,
        batch: Any,
        *,
        divisor: float | None = None,
        idx: int | None = None,
    ) -> None:
        """Begin a training batch, whose loss the trainer divides by this number.

        Without a divisor, it is found out from the loss, as in a bare loop. Without `idx`, batches
        are counted here.
        """
        self._watch.losses.divisor = divisor
        if idx is not None:
            self._batch_idx = idx
        self.reach_boundary()
        self._phases.begin_batch(Batch(batch, self._batch_idx, 0, "train"))
        self._batch_idx += 1

    def end_batch(self) -> bool:
        """End a batch that completes no step; the others end with the step.

        Returns:
            Whether the trainer is between two steps now.
        """
        if self._watch.rule.ends_with_batch:
            self._watch.end_open_step()
        batch = self._phases.batch
        if batch is None or batch.ended:
            return True
        self._phases.end_batch()
        self._phases.set_batch(None)  # what is logged from here on is of the step that goes on
        return False

    def before_backward(self, loss: torch.Tensor) -> None:
        """Fire `on_before_backward` with the loss that will be differentiated."""
        if self.hooks.dispatchers.on_before_backward is not None:
            self.loop.context.loss = loss
            self.fire("on_before_backward")
            self.loop.context.provide("loss", None)

    def take_logged(self, *, of_steps: bool) -> dict[str, float]:
        """Return what hooks have logged since the last call, the latest value of each name.

        Values of steps wait until the trainer logs its own; those of epochs and validations do not.

        Args:
            of_steps: whether the trainer logs now; else only what does not wait is returned.
        """
        taken, self._logged_otherwise = self._logged_otherwise, {}
        if of_steps:
            taken = self._logged_in_steps | taken
            self._logged_in_steps = {}
        return {name: to_float(value) for name, value in taken.items()}

    def log(self, name: str, value: Any, kind: Any = "scalar") -> None:
        """Give hooks, the run and the trainer's logger a number; see `Session.log`."""
        super().log(name, value, kind)
        if kind == "scalar" and self._on_log is not None:
            self._on_log(name, value)
        if kind == "scalar" and self._forwards_logs:
            waits = not (self.loop.context.evaluating or self._phases.epoch_is_over)
            values = self._logged_in_steps if waits else self._logged_otherwise
            is_tensor = isinstance(value, torch.Tensor)
            values[name] = LazyFloat(value.detach().clone()) if is_tensor else value

    def record_values(self, values: Mapping[str, Any]) -> None:
        """Record what the trainer has logged, under its own names."""
        own = {name: value for name, value in values.items() if is_single_number(value)}
        self.loop.record.metrics(self.step, self.loop.context.known("epoch"), own)

    # -- validation -------------------------------------------------------------------------------

    def start_validation(self) -> None:
        """Begin a validation; one before the first epoch and batch has the numbers of the start."""
        self.reach_boundary()
        context = self.loop.context
        self._phases.set_batch(None)
        self._known_before = context.known("epoch"), context.known("tokens_seen")
        context.epoch, context.tokens_seen = (number or 0 for number in self._known_before)
        self._phases.begin_validation()
        self.fire("on_validation_start")

    def start_validation_batch(self, batch: Any, idx: int, loader_idx: int = 0) -> None:
        """Begin a batch of a validation."""
        self._phases.begin_batch(Batch(batch, idx, loader_idx, "val"))

    def end_validation_batch(self, loss: Any = None) -> None:
        """End a batch of a validation."""
        batch = self._phases.batch
        if batch is not None and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            batch.logged["loss"] = LazyFloat(loss.detach())
        elif batch is not None and isinstance(loss, int | float):
            batch.logged["loss"] = loss
        self._phases.end_batch()
        self._phases.set_batch(None)

    def end_validation(self, metrics: Mapping[str, Any]) -> None:
        """End a validation with the trainer's metrics, which hooks get as `val/<name>`, too."""
        own = self._phases.validation or Means()
        self._phases.end_validation({**own.means(), **with_common_names(metrics)})
        self.leave_validation()

    def leave_validation(self) -> None:
        """Leave a validation, also one that has failed."""
        if self._phases.validation is None:
            return
        self._phases.leave_validation()
        self._phases.set_batch(None)
        self.loop.context.provide("epoch", self._known_before[0])
        self.loop.context.provide("tokens_seen", self._known_before[1])

    # -- checkpoints ------------------------------------------------------------------------------

    def restore(self, path: Path, state: Mapping[str, Any] | None, *, step: int) -> None:
        """Continue from a checkpoint of the trainer, before `begin`.

        The state is what `collect_state` returned; None if the checkpoint has none. Completed
        steps are those that the trainer has counted.
        """
        if state is None:
            log.warning(
                "%s was saved without this session: hooks start anew, at step %d.", path, step
            )
            context = self.loop.context
            context.step, context.step_in_progress = step, step + 1
            state = {}
        else:
            super()._restore_state(path, state)
            self._batch_idx = int(state.get("batch_idx", 0))
        self._restored = path, state

    def _restore_state(self, path: Path, state: Mapping[str, Any]) -> None:
        if self.started:
            raise LoopError(
                f"{self.library.name} trains already. Load the state of its hooks before it starts."
            )
        self._loaded = path, state  # the model comes with `connect`

    def restore_loaded(self) -> bool:
        """Restore what `load_state_dict` got; return whether it was called."""
        if self._loaded is None:
            return False
        path, state = self._loaded
        self.restore(path, state, step=state["step"])
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of hooks, updates and counters; see `Session.state_dict`."""
        if self._before_state is not None and self.is_training:
            self._before_state()
        return super().state_dict()

    def _find_loaded_path(self) -> Path:
        path = None if self._loaded_path is None else self._loaded_path()
        return super()._find_loaded_path() if path is None else path
