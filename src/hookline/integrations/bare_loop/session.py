"""Session: hooks in a loop that is not ours."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch

from hookline.context import LazyFloat, Metrics
from hookline.dispatch import HookManager, HookSettings, HooksMixin
from hookline.errors import HooklineError, NotSuppliedError
from hookline.hook import Hook
from hookline.integrations.bare_loop.averages import Averages
from hookline.integrations.bare_loop.bare_loop_context import BareLoopEventContext, Batch
from hookline.integrations.bare_loop.requirements import CALLS, refusals, waiting
from hookline.integrations.bare_loop.step_watch import StepWatch

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.recorded_session import SessionRecord
    from hookline.probes.sync import ProbeSync
    from hookline.runs.run import Run

__all__ = ["Session"]

log = logging.getLogger("hookline")
T = TypeVar("T")


class Session(HooksMixin[HookManager]):
    """What `attach` returns: the handle to detach, and the calls that tell hooks more.

    It is a context manager: entering it starts training (`on_train_start`), leaving it ends
    training and detaches. Without `with`, training starts at the first thing that is seen, and
    `detach()` ends it. Hooks get it as `trainer`; they may put attributes of their own on it.

    Attributes:
        run: the run and its folder; None without `attach(…, runs=…)`, before training starts, and
            on ranks other than the first.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        hooks: Iterable[Hook],
        *,
        scheduler: Any,
        scaler: torch.amp.GradScaler | None,
        config: Any,
        tokens: Callable[[Any], int] | None,
        settings: HookSettings | None,
        runs: str | os.PathLike[str] | Run | None = None,
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.scheduler = scheduler
        self.scaler = scaler
        self.config = SimpleNamespace(debug=False) if config is None else config
        self.best_accuracy = 0.0
        self.run: Run | None = None
        self._runs = runs
        self._record: SessionRecord | None = None
        context, steps = _parts(recorded=runs is not None)
        self._context = context(self, model, optimizers, config)
        self._count_tokens = tokens
        self._supplied: set[str] = {"config"} if config is not None else set()
        if runs is not None:
            self._supplied.add("run")
        self._validation: Averages | None = None
        self._validated: dict[str, Any] = {}
        self._stop_reason: str | None = None
        self.started = self._ended = False
        self._told_late_log = False
        self.hooks = HookManager(source=self._context, settings=settings)
        self.hooks.raise_on_missing_args = True  # until the first step
        self.hooks.register_hooks(hooks)
        self._steps = steps(self, self._context, scaler)
        self._probes: ProbeSync | None = None
        self.has_probes = False
        self.hooks.on_change = self._hooks_changed
        self._sync_probes()

    # -- where training stands --------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first optimizer."""
        return self.optimizers[0]

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._context.step

    @property
    def status(self) -> str:
        """`training`, or how it ended: `completed`, `stopped`, `interrupted` or `error`."""
        return self._context.status

    @property
    def should_stop(self) -> bool:
        """Whether somebody has called `stop`."""
        return self._stop_reason is not None

    def stop(self, reason: str = "") -> None:
        """End training after this batch. Only a loop over `session.batches` can be ended."""
        if "batches" not in self._supplied:
            raise NotSuppliedError(f"This loop cannot be stopped from outside. {CALLS['batches']}")
        self._stop_reason = reason

    # -- beginning and end ------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.begin()
        except BaseException as error:
            self._steps.take_off()  # `with` does not leave what it has not entered
            self._end_record("error", error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or self._ended:
            self.detach()
            return
        self.hooks.raise_on_missing_args = False  # once is enough
        context = self._context
        context.exception = error
        context.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        if isinstance(error, SystemExit | GeneratorExit):
            context.status = "stopped"  # leaving early is no failure
        for tell in (self._tell_exception, self.detach):
            try:
                tell()
            except HooklineError:  # the user's own error matters more, and is raised
                log.exception("A hook failed while it was told how training ended.")

    def _tell_exception(self) -> None:
        if self._context.status != "stopped":
            self.fire("on_exception")

    def begin(self) -> None:
        """Start training, once; the session does it by itself."""
        if not self.started:
            self._begin_record()
            self.started = True
            self.hooks.run_started()
            self._context.known_epoch = self._context.known_tokens = 0  # so much is certain
            self.fire("on_train_start")
            self._context.known_epoch = self._context.known_tokens = None
            self._steps.hooks_changed()

    def detach(self) -> None:
        """End training (`on_train_end`) and leave model, optimizers and scaler as they were."""
        if self._ended:
            return
        self._ended = True
        try:
            if self._context.status == "training":
                self._context.status = "stopped" if self.should_stop else "completed"
            if self.started:
                self.fire("on_train_end")
        finally:
            self._sync_probes()
            self._steps.take_off()
            self.hooks.run_ended()
            self._end_record(self._context.status, self._context.exception)
        if self._context.status in ("completed", "stopped"):
            for line in waiting(self.hooks, self._supplied):
                log.warning("The loop has ended. %s", line)

    # -- what an unchanged loop cannot tell -------------------------------------------------------

    def batches(self, loader: Iterable[T], name: str | None = None, idx: int = 0) -> Iterator[T]:
        """Draw batches from a loader, as `for batch in loader` does, and tell hooks of each.

        A batch that completes a step ends with `optimizer.step()`, others when the next is drawn.

        Args:
            loader: anything to iterate over.
            name: the loader's name; "train", or "val" within `validation()`.
            idx: its number, where a loop has several.
        """
        self.begin()
        self._supplied.add("batches")
        inside = self._validation
        kind = "train" if inside is None else "validation"
        if self.should_stop and inside is None:
            return
        for i, drawn in enumerate(loader):
            batch = Batch(drawn, i, idx, name or ("train" if inside is None else "val"))
            self._context.known_batch = batch
            self._steps.batch_begins()
            tokens = self._tokens_in(drawn)
            self.fire(f"on_{kind}_batch_start")
            yield drawn
            self.end_batch(tokens)
            if self.should_stop and inside is None:
                break
        self._context.known_batch = None

    def _tokens_in(self, batch: Any) -> int | None:
        if self._count_tokens is not None:
            tokens: int | None = int(self._count_tokens(batch))
        elif isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            tokens = batch["input_ids"].numel()
        else:
            tokens = None
        if tokens is not None:
            self._supplied.add("tokens")
        return tokens

    @contextmanager
    def epoch(self, number: int | None = None) -> Generator[int]:
        """Mark an epoch; gives its number, from 0."""
        self.begin()
        self._supplied.add("epoch")
        before = self._context.known_epoch
        epoch = number if number is not None else 0 if before is None else before + 1
        self._context.known_epoch = epoch
        self._context.averages = Averages()
        self._validated = {}
        self.fire("on_epoch_start")
        yield epoch
        means = self._context.averages.means("train/")
        self._context.metrics = Metrics(means | self._validated)
        self.fire("on_epoch_end")
        if self._record is not None:
            self._record.end_epoch(self._context.step, epoch, means)

    @contextmanager
    def validation(self) -> Generator[None]:
        """Mark validation. What is logged within becomes `val/<name>`, as a mean.

        The loop stays in charge: model mode, `no_grad` and random numbers are as it sets them.
        """
        self.begin()
        self._supplied.add("validation")
        training_batch, self._context.known_batch = self._context.known_batch, None
        self._validation = averages = Averages()
        try:
            self.fire("on_validation_start")
            yield
            self._context.metrics = metrics = Metrics(averages.means("val/"))
            self.fire("on_validation_end")
            self._validated = dict.copy(metrics)
            if self._record is not None:
                self._record.metrics(self._context.step, self._context.known_epoch, metrics)
            if "val/accuracy" in metrics:
                self.best_accuracy = max(self.best_accuracy, float(metrics["val/accuracy"]))
        finally:
            self._validation = None
            self._context.known_batch = training_batch

    def backward(self, loss: torch.Tensor, *, accumulate: int = 1, **options: Any) -> None:
        """Run backward and tell hooks the loss.

        Args:
            loss: the batch's own loss, neither divided nor scaled; both are done here.
            accumulate: how many batches make a step; the loss is divided by it.
            options: what `Tensor.backward` takes.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError(f"A loss is a tensor with one element, not {shown(loss)}.")
        self.begin()
        self._supplied.add("backward")
        divided = loss / accumulate if accumulate != 1 else loss
        self._context.known_loss = divided
        self.fire("on_before_backward")
        scaled = self.scaler.scale(divided) if self.scaler is not None else divided
        self._steps.run_backward(loss, lambda: scaled.backward(**options))

    def updates(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Say that this step's gradients are complete. Call it before clipping them.

        Without it, hooks on `on_gradients_ready`, and updates, are called just before
        `optimizer.step()`.

        Args:
            optimizer: whose gradients are complete, where several have backwards of their own; by
                default those of all.
        """
        self.begin()
        self._steps.gradients_ready(optimizer)

    def skip_optimizer_step(self, idx: int | None = None, reason: str = "a hook asked") -> None:
        """Let an optimizer's step change nothing this time; None: those of all.

        Its gradients are taken away just before it. A learning rate scheduler is the loop's own.
        """
        if idx is not None and not 0 <= idx < len(self.optimizers):
            raise IndexError(f"There is no optimizer {idx}; there are {len(self.optimizers)}.")
        self._steps.leave_out(-1 if idx is None else idx, reason)

    def clip(
        self, max_norm: float, *, optimizer: torch.optim.Optimizer | None = None, **options: Any
    ) -> torch.Tensor:
        """Clip gradients by norm, unscaled, and tell hooks; returns the norm before clipping.

        Args:
            max_norm: the largest norm to leave, for each optimizer's gradients.
            optimizer: whose gradients, where several have backwards of their own; by default all.
            options: what `torch.nn.utils.clip_grad_norm_` takes.
        """
        self._supplied.add("clip")
        self.updates(optimizer)
        norms: list[torch.Tensor] = []
        for i, one in enumerate(self.optimizers):
            if optimizer not in (None, one):
                continue
            parameters = [p for group in one.param_groups for p in group["params"]]
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, max_norm, **options))
            self._context.clipped_norm = norms[-1]
            self._context.optimizer_idx = i
            self.fire("on_gradient_clip")
        whole = torch.linalg.vector_norm(torch.stack(norms), options.get("norm_type", 2.0))
        self._context.clipped_norm = norms[0] if len(norms) == 1 else whole
        return self._context.clipped_norm

    def checkpoint(self, path: Any) -> None:
        """Tell hooks that the loop has written a checkpoint, complete, at this path."""
        self.begin()
        self._supplied.add("checkpoint")
        self._context.checkpoint_path = path
        if self._record is not None:
            self._record.event("checkpoint", path=str(path), step=self._context.step)
        self.fire("on_checkpoint_save")

    def resumed(
        self, path: Any, *, step: int, epoch: int | None = None, tokens_seen: int | None = None
    ) -> None:
        """Tell hooks that the loop has restored a checkpoint, and go on counting from there.

        Args:
            path: where the checkpoint is.
            step: completed steps.
            epoch: the epoch that comes next.
            tokens_seen: tokens trained on.
        """
        self.begin()
        self._supplied.add("resumed")
        self._context.step, self._context.step_in_progress = step, step + 1
        if epoch is not None:
            self._context.known_epoch = epoch - 1 if epoch else None
        if tokens_seen is not None:
            self._context.known_tokens = tokens_seen
            self._supplied.add("tokens")
        self._context.checkpoint_path = path
        if self._record is not None:
            self._record.event("resumed", path=str(path), step=step)
        self.fire("on_checkpoint_load")

    def log(
        self,
        name: str,
        value: Any,
        kind: Literal["scalar", "text", "histogram", "image"] = "scalar",
    ) -> None:
        """Give hooks and the record a number, or the record alone something else.

        A number whose name has no slash is in the batch's `metrics`, and its mean in those of the
        epoch or the validation; a record has it for each step, too. Log it before
        `optimizer.step()`: a batch that completes a step ends there. A name with a slash, and
        every other kind than a scalar, goes to the record as it stands.

        Args:
            name: its name; at the end of an epoch `train/<name>`, of validation `val/<name>`.
            value: a number, or a tensor with one element, which is not read until looked at.
            kind: what the value is for the record: a scalar, text, histogram or image.
        """
        if kind != "scalar" or "/" in name:
            self.begin()
            if self._record is not None:
                context = self._context
                self._record.value(context.step, context.known_epoch, name, value, kind)
            return
        if not _is_number(value):
            raise TypeError(
                f"session.log('{name}', …) takes a number or a tensor with one element, "
                f"not {shown(value)}."
            )
        self.begin()
        if isinstance(value, torch.Tensor):
            value = value.detach()
        (self._context.averages if self._validation is None else self._validation).add(name, value)
        batch = self._context.known_batch
        late = batch is not None and batch.ended
        if self._record is not None and self._validation is None:
            self._log_to_record(name, value, late)
        if batch is not None and not late:
            batch.logged[name] = LazyFloat(value) if isinstance(value, torch.Tensor) else value
        elif late and self.hooks.dispatchers.on_train_batch_end and not self._told_late_log:
            self._told_late_log = True
            log.warning(
                "session.log('%s') came after optimizer.step(), when on_train_batch_end had been "
                "told: it counts for the epoch only. Log before the step.",
                name,
            )

    def log_dict(self, values: Mapping[str, Any]) -> None:
        """Log several numbers."""
        for name, value in values.items():
            self.log(name, value)

    # -- the record -------------------------------------------------------------------------------

    def _begin_record(self) -> None:
        if self._runs is None:
            return
        from hookline.integrations.bare_loop.recorded_session import SessionRecord

        record = SessionRecord(self._runs)
        record.start(self, self._context.known_config)
        if record.run is not None:
            self._record, self.run = record, record.run

    def _log_to_record(self, name: str, value: Any, late: bool) -> None:
        record, context = self._record, self._context
        if record is not None and late:  # its step has been written
            record.value(context.step, context.known_epoch, f"train/{name}", value, "scalar")
        elif record is not None:
            record.logged(name, value)

    def end_recorded_step(self, loss: LazyFloat | None) -> None:
        """Write what belongs to the step that has just ended; `loss` is None when not known."""
        if self._record is not None:
            self._record.end_step(self._context.step, self._context.known_epoch, loss)

    def _end_record(self, status: str, error: BaseException | None) -> None:
        if self._record is not None:
            self._record.close(status, self._stop_reason, self.hooks.summary(), error)
            self._record = None

    def _hooks_changed(self) -> None:
        self._steps.hooks_changed()
        self._sync_probes()
        if self._record is not None:
            statuses = {info.name: info.status for info in self.hooks.describe()}
            self._record.event("hooks", step=self._context.step, hooks=statuses)

    def end_step(self) -> None:
        """A step is over: edits that were toggled within it are put on or taken off now."""
        if self._probes is not None:
            self._probes.end_step()
            if self._probes.waiting:
                self._sync_probes(at_boundary=True)

    def _sync_probes(self, *, at_boundary: bool = False) -> None:
        """Have the probes that are enabled on the model, until training ends."""
        if self._probes is None and self.hooks.of_kind("probe"):
            from hookline.probes.sync import ProbeSync  # most loops have none

            self._probes = ProbeSync(self.hooks, self.model, _Standing(self))
            self.has_probes = True
        if self._probes is not None:
            started = self.started and not self._ended
            self._probes.sync(on=not self._ended, within_step=started and not at_boundary)

    # -- what the watches call --------------------------------------------------------------------

    def fire(self, event: str) -> None:
        """Fire an event as the loop stands."""
        dispatch = getattr(self.hooks.dispatchers, event)
        if dispatch is not None:
            dispatch(self._context)

    def end_batch(self, tokens: int | None = None) -> None:
        """End the batch, if there is one that has not ended."""
        batch = self._context.known_batch
        if batch is None or batch.ended:
            return
        batch.ended = True
        if self._validation is not None:
            self._context.metrics = Metrics(batch.logged)
            self._context.known_loss = batch.logged.get("loss")
            self._context.why_no_loss = f". {CALLS['log']}"
            self.fire("on_validation_batch_end")
            return
        if tokens is None:
            tokens = self._tokens_in(batch.batch)
        if tokens is not None:
            self._context.known_tokens = (self._context.known_tokens or 0) + tokens
        if self.hooks.dispatchers.on_train_batch_end is not None:
            loss = self._steps.batch_loss()
            known = {} if loss is None else {"loss": loss}
            self._context.metrics = Metrics(known | batch.logged)
            self.fire("on_train_batch_end")

    def refusals(self) -> list[str]:
        """What hooks need and this loop has not supplied, a line each."""
        return list(refusals(self.hooks, self._supplied))

    def say_what_waits(self) -> None:
        """Name hooks that wait for something which may still come."""
        for line in waiting(self.hooks, self._supplied):
            log.info("%s", line)


def _parts(*, recorded: bool) -> tuple[type[BareLoopEventContext], type[StepWatch]]:
    """Of which classes a session is made; a loop without a record does nothing for one."""
    if not recorded:
        return BareLoopEventContext, StepWatch
    from hookline.integrations.bare_loop.recorded_session import RecordedMoment, RecordedSteps

    return RecordedMoment, RecordedSteps


class _Standing:
    """Where the loop stands, as probes ask for it: what it has not told is None."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def trainer(self) -> Session:
        return self._session

    @property
    def step(self) -> int:
        return self._session._context.step

    @property
    def step_in_progress(self) -> int:
        return self._session._context.step_in_progress

    @property
    def epoch(self) -> int | None:
        return self._session._context.known_epoch

    @property
    def evaluating(self) -> bool:
        return self._session._validation is not None


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float | LazyFloat) and not isinstance(value, bool)


def shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r}, a {type(value).__name__}"
