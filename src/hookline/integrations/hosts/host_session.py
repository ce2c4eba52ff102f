"""HostSession: hooks in a loop that belongs to another library's trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from hookline.context import LazyFloat
from hookline.dispatch import HookManager
from hookline.errors import LoopError, NotSuppliedError
from hookline.hook import Hook
from hookline.integrations.bare_loop.bare_loop_context import Batch
from hookline.integrations.bare_loop.session import Session
from hookline.integrations.bare_loop.session_state import restore_progress
from hookline.integrations.hosts.host_events import Host
from hookline.integrations.hosts.host_metrics import with_common_names
from hookline.loop.control_requests import ControlRequests
from hookline.loop.means import Means
from hookline.loop.model_watch import CalledModules
from hookline.loop.signals import SignalWatch

__all__ = ["HostSession"]

log = logging.getLogger("hookline")


class HostSession(Session):
    """A session in a host's loop; the host's callbacks call the methods below.

    The model and the optimizers are given by `connect`, when the host has made them. The options
    that are not listed here are those of `attach`.

    Args:
        host: what the host gives to hooks.
        log_to_host: gets, after each step, the numbers that hooks have logged in it.
        batch_metrics: returns what the host has logged in the training batch that ends, for hooks
            that ask for its metrics.

    Attributes:
        ends_for_signal: whether training ends because a process has received a signal; None while
            it does not end.
    """

    def __init__(
        self,
        host: Host,
        hooks: Iterable[Hook] | HookManager,
        *,
        allow_missing: bool = False,
        watch_generation: bool = False,
        log_to_host: Callable[[dict[str, float]], None] | None = None,
        batch_metrics: Callable[[], Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(  # the model comes later
            None,  # type: ignore[arg-type]
            [],
            hooks,
            schedulers=[],
            scaler=None,
            watch_generation=watch_generation,
            **options,
        )
        self.host = host
        self._allow_missing = allow_missing
        self._log_to_host, self._batch_metrics = log_to_host, batch_metrics
        self._for_host: dict[str, Any] = {}
        self._is_connected = False
        self._loaded: tuple[Path, Mapping[str, Any]] | None = None  # restored when it is connected
        self._batch_idx = 0
        self._known_before: tuple[int | None, int | None] = (None, None)  # before a validation
        self._unwatched: torch.optim.Optimizer | None = None  # that the user was told about
        self._has_told_signal = False
        self.ends_for_signal: bool | None = None
        self._requests = ControlRequests()
        self._cleanup = ExitStack()
        self._supplied |= host.supplied
        self._context.calls = {**self._context.calls, **host.calls}
        self._refuse_missing()

    def _refuse_missing(self) -> None:
        """Raise for hooks that need events which the host does not give; or warn."""
        problems = [
            f"{', '.join(listeners)} needs {event}: {why}"
            for event, why in self.host.missing.items()
            if (listeners := self.hooks.listeners(event, needed=True))
        ]
        if problems and not self._allow_missing:
            raise NotSuppliedError(
                f"Hooks need what {self.host.name} does not provide:",
                *(f"  - {problem}" for problem in problems),
                "Remove them, or attach with allow_missing=True: they are not called then.",
            )
        for problem in problems:
            log.warning("%s does not provide everything: %s", self.host.name, problem)

    # -- start and end ----------------------------------------------------------------------------

    @property
    def is_training(self) -> bool:
        """Whether the host trains with these hooks."""
        return self.started and not self._ended

    @property
    def has_run(self) -> bool:
        """Whether the first process writes a run."""
        return self._context.has_run

    @property
    def has_ended(self) -> bool:
        """Whether training with these hooks has ended."""
        return self._ended

    def __enter__(self) -> Self:
        return self  # the host starts training

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_connected:
            super().__exit__(kind, error, traceback)

    def begin(self) -> None:
        """Start training (`on_train_start`), when the host has started it."""
        if self._is_connected:
            super().begin()

    def connect(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        schedulers: Iterable[Any] = (),
        scaler: torch.amp.GradScaler | None = None,
        signals: Iterable[str] | None = (),
        called: CalledModules | None = None,
        ends_with_batch: bool = False,
    ) -> None:
        """Watch what the host trains; call `begin` when everything is restored.

        Args:
            model: the model, as hooks get it.
            optimizers: the optimizers.
            schedulers: the learning-rate schedulers.
            scaler: what scales the loss.
            signals: signals to stop at, apart from SIGINT; None if signals are left alone.
            called: what the host calls, where this is not the model itself.
            ends_with_batch: whether a batch ends a step in which some of the optimizers have not
                stepped.
        """
        if self._is_connected:
            raise LoopError(
                f"{self.host.name} has started a second training, and a session belongs to one. "
                "Attach again before each: `hookline.attach(trainer, …)`."
            )
        self.model, self.optimizers = model, optimizers
        self.schedulers, self.scaler = list(schedulers), scaler
        self._context.connect(model, optimizers)
        if called is not None:
            self._context.called = called
        self._connect()
        self._step_watch.ends_with_batch = ends_with_batch
        self._is_connected = True
        if self._allow_missing:
            self._step_watch.checks.allow_missing = True
            self.hooks.raise_on_missing_args = False
        if signals is not None:
            self._cleanup.enter_context(SignalWatch(self._requests, signals))

    def is_watched(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the steps of this optimizer are seen; if not, warn once.

        Raises:
            LoopError: There are updates, which the gradients of this optimizer do not get.
        """
        if any(optimizer is own for own in self.optimizers):
            return True
        if optimizer is not self._unwatched:
            self._unwatched = optimizer
            problem = (
                f"{self.host.name} steps with another optimizer ({type(optimizer).__name__}) than "
                "the one with which training has started, so hooks do not see its steps. Replace "
                "the optimizer before training starts."
            )
            if self.hooks.dispatchers.update is not None:
                raise LoopError(f"{problem} Updates of gradients would be left out.")
            log.warning("%s", problem)
        return False

    def use_config(self, config: Any) -> None:
        """Give hooks the host's configuration, unless the user has given one."""
        if self._context.known_config is None:
            self._context.known_config = self.config = config
            self._supplied = self._supplied | {"config"}

    def detach(self) -> None:
        """End training (`on_train_end`) and remove all hooks from the host's objects."""
        self._cleanup.close()
        if self._is_connected:
            super().detach()
        elif self._context.status == "training":  # the host had nothing to train
            self._context.status = "completed"
        self._ended = True

    def stop(self, reason: str = "") -> None:
        """Ask the host to end training after the step in progress; the first reason is kept."""
        if not self._is_connected:
            raise LoopError(f"{self.host.name} has not started training, so nothing can stop.")
        super().stop(reason)

    def preempt(self, signal: str) -> None:
        """End training because of a signal that the host has handled."""
        self._stop_because_of(signal)
        self._context.status = "preempted"
        self.detach()

    def _stop_because_of(self, signal: str) -> None:
        if self._recorder is not None:
            self._recorder.event("signal", step=self._context.step, signal=signal)
        self._ask_to_stop(signal)

    @property
    def received_signal(self) -> str | None:
        """The name of the signal that asked the process to end, such as `SIGTERM`."""
        received = self._requests.signal
        return None if received is None else received.name

    def take_stop(self) -> bool:
        """Return whether the host should end training now: a hook or a signal asks for it.

        Several processes call this at the same places, and end training together.
        """
        if self._requests.signal is None and self._stop.reason is None:
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
        name, agreement = self.received_signal, self._agreement
        flags = [name is not None, name == "SIGINT"]
        if agreement is not None:
            flags = [agreement.any_rank(flag) for flag in flags]
        self.ends_for_signal, is_interrupt = flags
        if self.ends_for_signal and self._context.status == "training":
            self._context.status = "interrupted" if is_interrupt else "preempted"

    # -- epochs, batches, steps -------------------------------------------------------------------

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0."""
        if self._resumed_epoch != epoch:
            self._batch_idx = 0
        self._reach_boundary()
        self._begin_epoch(epoch)

    def end_epoch(self, metrics: Mapping[str, Any] | None = None) -> None:
        """End the epoch; `metrics` are the host's own."""
        found = with_common_names(metrics or {})
        found.pop("train/loss", None)  # its mean is that of the losses which backward ran on
        self._validated |= found
        self._context.known_batch = None
        self._end_epoch()

    def start_batch(
        self,
        batch: Any,
        *,
        divisor: float | None = None,
        idx: int | None = None,
        loader_idx: int = 0,
        loader_name: str = "train",
    ) -> None:
        """Begin a training batch, whose loss the host divides by this number.

        Without a divisor, it is found out from the loss, as in a bare loop. Without `idx`, batches
        are counted here.
        """
        self._step_watch.losses.divisor = divisor
        if idx is not None:
            self._batch_idx = idx
        if self._checkpoints is not None:
            self._reach_boundary()
        self._begin_batch(Batch(batch, self._batch_idx, loader_idx, loader_name))
        self._batch_idx += 1

    def end_batch(self) -> bool:
        """End a batch that completes no step; the others end with the step.

        Returns:
            Whether the host is between two steps now.
        """
        context = self._context
        if self._step_watch.ends_with_batch:
            self._step_watch.end_open_step()
        batch = context.known_batch
        has_stepped = batch is None or batch.ended
        if not has_stepped:
            self._end_batch()
        context.known_batch = None
        return has_stepped

    def _host_batch_metrics(self) -> Mapping[str, Any]:
        if self._batch_metrics is None or not self._step_watch.needs.batch_metrics:
            return {}
        return self._batch_metrics()

    def before_backward(self, loss: torch.Tensor) -> None:
        """Fire `on_before_backward` with the loss that will be differentiated."""
        if self.hooks.dispatchers.on_before_backward is not None:
            self._context.known_loss = loss
            self._fire("on_before_backward")
            self._context.known_loss = None

    def end_step(self) -> None:
        """Give the host's logger what hooks have logged; the host has counted its step."""
        if self._for_host and self._log_to_host is not None:
            values, self._for_host = self._for_host, {}
            self._log_to_host({name: float(value) for name, value in values.items()})

    def log(self, name: str, value: Any, kind: Any = "scalar") -> None:
        """Give hooks, the run and the host's logger a number; see `Session.log`."""
        super().log(name, value, kind)
        if kind == "scalar" and self._log_to_host is not None:
            is_tensor = isinstance(value, torch.Tensor)
            self._for_host[name] = LazyFloat(value.detach().clone()) if is_tensor else value

    def record_host_values(self, values: Mapping[str, Any]) -> None:
        """Record what the host has logged, under its own names."""
        if self._recorder is not None:
            own = {name: value for name, value in values.items() if _is_number(value)}
            self._recorder.metrics(self._context.step, self._context.known_epoch, own)

    # -- validation -------------------------------------------------------------------------------

    def start_validation(self) -> None:
        """Begin a validation; one before the first epoch and batch has the numbers of the start."""
        self._reach_boundary()
        context = self._context
        context.known_batch = None
        self._known_before = context.known_epoch, context.known_tokens
        context.known_epoch = context.known_epoch or 0
        context.known_tokens = context.known_tokens or 0
        self._begin_validation()
        self._fire("on_validation_start")

    def start_validation_batch(self, batch: Any, idx: int, loader_idx: int = 0) -> None:
        """Begin a batch of a validation."""
        self._begin_batch(Batch(batch, idx, loader_idx, "val"))

    def end_validation_batch(self, loss: Any = None) -> None:
        """End a batch of a validation."""
        batch = self._context.known_batch
        if batch is not None and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            batch.logged["loss"] = LazyFloat(loss.detach())
        elif batch is not None and isinstance(loss, int | float):
            batch.logged["loss"] = loss
        self._end_batch()
        self._context.known_batch = None

    def end_validation(self, metrics: Mapping[str, Any]) -> None:
        """End a validation with the host's metrics, which hooks get as `val/<name>`, too."""
        own = self._validation or Means()
        self._end_validation({**own.means(), **with_common_names(metrics)})
        self.leave_validation()

    def leave_validation(self) -> None:
        """Leave a validation, also one that has failed."""
        if self._validation is None:
            return
        self._leave_validation()
        self._context.known_batch = None
        self._context.known_epoch, self._context.known_tokens = self._known_before

    # -- checkpoints ------------------------------------------------------------------------------

    def notify_saved(self, path: str, *, step: int, epoch: int | None) -> None:
        """Fire `on_checkpoint_save` for a checkpoint of this step, which may be an earlier one."""
        context = self._context
        now = context.step, context.known_epoch
        context.step, context.known_epoch = step, epoch
        try:
            self.notify_checkpoint_saved(path)
        finally:
            context.step, context.known_epoch = now

    def restore(self, path: Path, state: Mapping[str, Any] | None, *, step: int) -> None:
        """Continue from a checkpoint of the host, before `begin`.

        Args:
            path: the host's checkpoint.
            state: what `collect_state` returned when it was saved; None if it has none.
            step: completed steps, as the host counts them.
        """
        if state is None:
            log.warning(
                "%s was saved without this session: hooks start anew, at step %d.", path, step
            )
            self._context.step, self._context.step_in_progress = step, step + 1
            state = {}
        else:
            restore_progress(self, state)
            self._batch_idx = int(state.get("batch_idx", 0))
        self._restored = path, state

    def _restore_state(self, path: Path, state: Mapping[str, Any]) -> None:
        if self.started:
            raise LoopError(
                f"{self.host.name} trains already. Load the state of its hooks before it starts."
            )
        self._loaded = path, state  # the model comes with `connect`

    def _restore_loaded(self) -> None:
        """Restore what `load_state_dict` was given, when the model is known."""
        if self._loaded is not None:
            path, state = self._loaded
            self.restore(path, state, step=state["step"])


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
