"""The session's connection to the loop: start and end, hooks, probes and the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from hookline.arguments import as_reason
from hookline.context import Metrics
from hookline.dispatch import HookManager, HookSettings
from hookline.errors import HooklineError, LoopError, NotSuppliedError, StopTraining
from hookline.hook import Hook
from hookline.integrations.bare_loop.bare_loop_context import BareLoopEventContext, ProbeContext
from hookline.integrations.bare_loop.exit_handler import detach_at_exit
from hookline.integrations.bare_loop.generation import GenerationWatch
from hookline.integrations.bare_loop.hook_needs import saves_checkpoints
from hookline.integrations.bare_loop.loop_agreement import (
    LoopAgreement,
    is_sharded_loop,
    trains_together,
)
from hookline.integrations.bare_loop.recorded_loop import RecordedLoop
from hookline.integrations.bare_loop.requirements import (
    CALLS,
    pending_requirements,
    unmet_requirements,
)
from hookline.integrations.bare_loop.step_callbacks import StepCallbacks
from hookline.integrations.bare_loop.step_watch import StepWatch
from hookline.integrations.bare_loop.stop_request import StopRequest
from hookline.loop.evaluation import count_tokens, make_counter
from hookline.loop.means import Means
from hookline.loop.processes import is_main_process, local_rank

if TYPE_CHECKING:
    from hookline.config.trainer_config import CheckpointConfig
    from hookline.integrations.bare_loop.recorded_session import SessionRecorder
    from hookline.integrations.bare_loop.session_checkpoints import SessionCheckpoints
    from hookline.runs.run import Run

__all__ = ["AttachedLoop", "DefaultRuns"]

log = logging.getLogger("hookline")


class DefaultRuns(Enum):
    """Where runs are written if the user does not say: `runs`, if a hook logs values to the run."""

    IF_RECORDED = "runs"


class AttachedLoop(RecordedLoop):
    """A loop that hooks are attached to; `Session` adds the calls that the loop may make."""

    _context: BareLoopEventContext
    _batch_idx = 0  # of the next batch, where a host counts them

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        hooks: Iterable[Hook] | HookManager,
        *,
        schedulers: list[Any],
        scaler: torch.amp.GradScaler | None,
        config: Any,
        tokens: Callable[[Any], int] | Literal["auto"] | None,
        settings: HookSettings | None,
        loss_divided: bool | None,
        on_stop: Literal["warn", "raise"],
        stop_grace: int,
        runs: str | os.PathLike[str] | Run | DefaultRuns | None,
        checkpoints: CheckpointConfig,
        hparams: dict[str, Any],
        name: str | None,
        tags: Iterable[str],
        trackers: Any = None,
        report: bool = True,
        watch_generation: bool = False,
    ) -> None:
        if isinstance(hooks, HookManager):
            given_hooks = [hooks.get_hook(name) for name in hooks.list_hooks()]
        else:
            hooks = hooks if isinstance(hooks, Hook) else list(hooks)  # one alone is refused below
            given_hooks = [] if isinstance(hooks, Hook) else hooks
        if isinstance(runs, DefaultRuns):
            records = any(getattr(hook, "hookline_records", False) for hook in given_hooks)
            records = records or trackers is not None or any(map(saves_checkpoints, given_hooks))
            runs = runs.value if records else None
        self.model = model
        self.optimizers = optimizers
        self.schedulers = schedulers
        self._loss_divided = loss_divided
        self.hparams, self.name = hparams, name
        self.tags = list(tags)
        self.training_description: dict[str, Any] | None = None  # of before a checkpoint was loaded
        self.scaler = scaler
        self.config = SimpleNamespace(debug=False) if config is None else config
        self.best_accuracy = 0.0
        self.run: Run | None = None
        self._runs, self._trackers, self._wants_report = runs, trackers, report
        self._recorder: SessionRecorder | None = None
        self._checkpoint_settings = checkpoints
        self._checkpoints: SessionCheckpoints | None = None  # made when it is needed
        self._restored: tuple[Path, Mapping[str, Any]] | None = None  # the checkpoint, its state
        self._context = BareLoopEventContext(self, model, optimizers, config, runs is not None)
        own_count = None if tokens is None or isinstance(tokens, str) else make_counter(tokens)
        self._tokens_fn = count_tokens if isinstance(tokens, str) else own_count
        given = {"config": config, "run": runs}
        self._supplied = {name for name, value in given.items() if value is not None}
        self._watches_generation = watch_generation
        self._generation: GenerationWatch | None = None
        self._validation: Means | None = None
        self._validated: dict[str, Any] = {}
        self._resumed_epoch: int | None = None  # that was in progress when a checkpoint was saved
        self._epoch_is_over = False
        self._stop = StopRequest(on_stop, stop_grace)
        self._agreement: LoopAgreement | None = None  # where several processes train the model
        self.started = self._ended = False
        self._cancel_detach_at_exit: Callable[[], None] | None = None
        self._warned_late_log = self._warned_no_run = False
        self.hooks = HookManager(source=self._context, settings=settings)
        self.hooks.raise_on_missing_args = True  # until the first step
        self.hooks.set_process(is_main=is_main_process(), is_local_main=local_rank() == 0)
        self.hooks.register_hooks(hooks)
        if optimizers:
            self._connect()

    def _connect(self) -> None:
        """Watch the model and the optimizers."""
        callbacks = StepCallbacks(
            begin=self.begin,
            before_forward=self._before_forward,
            after_forward=self._after_forward,
            end_batch=self._end_batch,
            record_step=self._record_step if self._is_recorded else None,
            unmet_requirements=self._unmet_requirements,
            requirements_met=self._requirements_met,
            record_skip=self._record_skip,
        )
        self._step_watch = StepWatch(
            self._context, self.hooks, self.scaler, callbacks, self._loss_divided
        )
        self._step_watch.attach()
        self.hooks.on_change = self._hooks_changed
        self.hooks.failures.on_failure = self._hook_failed
        self._sync_probes()
        self._generation = GenerationWatch(self.model, self._set_generating)
        self._generation.start()

    def _set_generating(self, generating: bool) -> None:
        self._context.generating = generating
        self._context.shows_generation = generating and self._watches_generation

    # -- stopping ---------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether `stop` was called; setting it is the same as calling it.

        A loop that reads it is expected to end itself.
        """
        self._stop.has_been_read |= self._stop.is_active
        return self._stop.is_active

    @should_stop.setter
    def should_stop(self, should_stop: bool) -> None:
        if should_stop:
            self.stop("trainer.should_stop was set")
        else:
            self._stop.withdraw()

    def stop(self, reason: str = "") -> None:
        """Ask the loop to end: `should_stop` is True from now on; the first reason is kept.

        A loop over `session.batches` ends after the batch in progress. Where several processes
        train together, `should_stop` is True in all of them from the end of the step on.
        """
        reason = as_reason(reason)
        self._record_stop(reason)
        self._ask_to_stop(reason)

    def _ask_to_stop(self, reason: str) -> None:
        self._stop.make(reason, self._context.step_in_progress)
        self._step_watch.after_step = self._after_step

    def _after_step(self) -> None:
        """Do what is rarely needed at the end of a step, or where several processes train."""
        if self._checkpoints is not None and self._checkpoints.is_waiting:
            self._checkpoints.step_ended()
        self._agree()
        if self._stop.is_active:
            self._stop.check(self._context.step)

    def _agree(self) -> None:
        """Apply what hooks of any process have requested."""
        agreement, step = self._agreement, self._context.step
        if agreement is None:
            return
        stops = self._stop.reason is not None
        has_news = self._checkpoints is not None and self._checkpoints.has_news
        stop, news = agreement.end_step(step, self._sink, stops=stops, has_news=has_news)
        if stop:
            self._record_stop("another process asked for it")
            self._stop.agree(step)
        if news:
            self._make_checkpoints().exchange_news()

    # -- start and end ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._ended:
            raise LoopError(
                "This session has ended, so its hooks would not be called. Attach again: "
                "`with hookline.attach(…) as session:`."
            )
        try:
            self.begin()
        except BaseException as error:
            self._step_watch.detach()  # `__exit__` is not called
            if self._generation is not None:
                self._generation.stop()
            self._close_recorder("error", error)
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
        self.hooks.raise_on_missing_args = False  # one error is enough
        context = self._context
        context.exception = error
        if self._agreement is not None:
            self._agreement.processes.report_error(error)
        context.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        if isinstance(error, SystemExit | GeneratorExit | StopTraining):
            context.status = "stopped"  # leaving early is not a failure
        for end in (self._fire_exception, self.detach):
            try:
                end()
            except HooklineError:  # the user's own error matters more, and is raised
                log.exception("A hook failed at the end of training.")

    def _fire_exception(self) -> None:
        if self._context.status != "stopped":
            self._fire("on_exception")

    def begin(self) -> None:
        """Start training; nothing happens after the first call, which the session makes itself."""
        if not self.started:
            self._join_processes()
            self._start_recorder()
            self.started = True
            self._cancel_detach_at_exit = detach_at_exit(self)
            self._start_saving()
            self.hooks.run_started()
            context = self._context
            known = context.known_epoch, context.known_tokens
            context.known_epoch, context.known_tokens = known[0] or 0, known[1] or 0  # known here
            self._fire("on_train_start")
            context.known_epoch, context.known_tokens = known
            if self._restored is not None:
                self._fire_load()
            self._step_watch.start()

    def _join_processes(self) -> None:
        """Agree with the other processes that train the model, if there are any."""
        wrapper = self._context.called.wrapper
        if not trains_together(self.model if wrapper is None else wrapper, self.optimizers):
            return
        self._agreement = LoopAgreement(self.hooks, self._context)
        self._stop.needs_agreement = True
        self._step_watch.skips.share(self._agreement.any_rank)
        self._step_watch.after_step = self._after_step
        if is_sharded_loop(self.optimizers):
            self._make_checkpoints()  # in all processes, because a hook of any may ask for one

    def detach(self) -> None:
        """End training (`on_train_end`) and remove all hooks from model, optimizers and scaler."""
        if self._ended:
            return
        self._ended, ends_together = True, False
        if self._cancel_detach_at_exit is not None:
            self._cancel_detach_at_exit()
        try:
            if self._context.status == "training":
                ends_early = self._stop.is_active and not self._stop.is_ignored
                self._context.status = "stopped" if ends_early else "completed"
                if self._agreement is not None:
                    ends_together = self._agreement.close(self._sink)
            if self._checkpoints is not None:
                failed = self._context.status in ("error", "interrupted")
                self._checkpoints.finish(failed=failed, together=ends_together)
            if ends_together:
                self._agree()  # on the checkpoints that have just been finished
            if self.started:
                # In all processes or in none: a hook of rank 0 may save.
                with self._make_checkpoints().ending() if ends_together else nullcontext():
                    self._fire("on_train_end")
        except BaseException as error:
            if self._context.exception is None:
                self._context.status, self._context.exception = "error", error
            raise
        finally:
            self._sync_probes()
            self._step_watch.detach()
            if self._generation is not None:
                self._generation.stop()
            self.hooks.run_ended()
            if self._checkpoints is not None:
                self._checkpoints.close()
            self._close_recorder(self._context.status, self._context.exception)
        if self._context.status == "stopped" and self._stop.is_active:
            reason = f": {self._stop.reason}" if self._stop.reason else ""
            self._announce(f"stopped after {self._context.step} steps{reason}")
        if self._context.status in ("completed", "stopped"):
            for line in pending_requirements(self.hooks, self._supplied, self._context.calls):
                log.warning("The loop has ended. %s", line)

    # -- checkpoints ------------------------------------------------------------------------------

    def _make_checkpoints(self) -> SessionCheckpoints:
        """Return what saves and loads checkpoints; importing it takes long."""
        if self._checkpoints is None:
            from hookline.integrations.bare_loop.sharded_checkpoints import make_checkpoints

            self._checkpoints = make_checkpoints(self, self._checkpoint_settings)
            self._step_watch.at_boundary = self._reach_boundary
        self._step_watch.after_step = self._after_step
        return self._checkpoints

    def _start_saving(self) -> None:
        """Prepare for hooks that save."""
        if any(saves_checkpoints(self.hooks.get_hook(name)) for name in self.hooks):
            self._step_watch.checks.check_compiled()
            self._supplied |= {"checkpoint", "resumed"}  # they cause these events themselves
            self._make_checkpoints().prepare_after_step()

    def _reach_boundary(self) -> None:
        """Save what hooks have requested: the loop is between two steps."""
        if self._checkpoints is not None:
            self._checkpoints.save_requested()

    def _fire_load(self) -> None:
        if self._restored is not None:
            self._context.checkpoint_path = self._restored[0]
            self._fire("on_checkpoint_load")

    # -- hooks and probes -------------------------------------------------------------------------

    def _fire(self, event: str) -> None:
        dispatch = getattr(self.hooks.dispatchers, event)
        if dispatch is None:
            return
        try:
            dispatch(self._context)
            if self._checkpoints is not None and not self._ended:
                self._checkpoints.event_ended(in_step=self._step_watch.has_new_gradients)
        except NotSuppliedError:
            if self.hooks.raise_on_missing_args:  # for all that is known by now
                needs = () if event.startswith("on_train_batch") else ("config", "run")
                self._step_watch.checks.raise_or_warn(self._unmet_requirements(*needs))
            raise

    def _before_forward(self) -> None:
        if not self._context.generating:
            self.begin()
            super()._before_forward()

    def _after_forward(self, outputs: Any) -> None:
        if not self._context.generating:
            super()._after_forward(outputs)

    def _request_skip(self, idx: int, reason: str) -> None:
        # The optimizer's gradients are removed just before its step, which then changes nothing.
        self._step_watch.skips.request(idx, reason)

    def _watch_model(self) -> None:
        self._step_watch.hooks_changed()
        if self._agreement is not None:
            self._agreement.hooks_toggled = True

    def _sync_probes(self, *, at_boundary: bool = False) -> None:
        super()._sync_probes(at_boundary=at_boundary)
        if self._probes is not None:
            self._step_watch.end_probes = self._end_probes

    def _end_probes(self) -> None:
        """Apply toggles of edits that waited for the end of the step."""
        if self._probes is not None:
            self._probes.end_step()
            if self._probes.waiting:
                self._sync_probes(at_boundary=True)

    def _probe_context(self) -> Any:
        return ProbeContext(self._context)

    def _probe_phase(self) -> tuple[bool, bool]:
        return not self._ended, self.started and not self._ended

    def _end_batch(self) -> None:
        """End the batch in progress, if there is one."""
        context, watch = self._context, self._step_watch
        batch = context.known_batch
        if batch is None or batch.ended:
            return
        batch.ended = True
        if watch.phases.timed:
            watch.phases.end_part()
        if self._validation is not None:
            context.metrics = Metrics(batch.logged)
            context.known_loss = batch.logged.get("loss")
            context.why_no_loss = f". {CALLS['log']}"
            self._fire("on_validation_batch_end")
            return
        if batch.tokens is not None:
            context.known_tokens = (context.known_tokens or 0) + batch.tokens
        if watch.dispatchers.on_train_batch_end is not None:
            loss = watch.batch_loss() if watch.losses.wanted else None
            known = {} if loss is None else {"loss": loss}
            host = self._host_batch_metrics()
            context.metrics = Metrics({**known, **batch.logged, **host})
            self._fire("on_train_batch_end")

    def _host_batch_metrics(self) -> Mapping[str, Any]:
        """Return what a host has logged in the training batch that ends."""
        return {}

    def _unmet_requirements(self, *needs: str) -> list[str]:
        calls = self._context.calls
        return list(unmet_requirements(self.hooks, self._supplied, needs or CALLS, calls))

    def _requirements_met(self) -> None:
        """Before the first step: from now on, what is missing is a warning."""
        self.hooks.raise_on_missing_args = False
        for line in pending_requirements(self.hooks, self._supplied, self._context.calls):
            log.info("%s", line)
