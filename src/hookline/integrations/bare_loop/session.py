"""Session: what `attach` returns. It connects hooks to a loop that is not ours, and detaches them.

    attach → __init__ → _connect      watch model, optimizers and scaler
    with, or the first call → begin   join the ranks, start the run, on_train_start
    the loop calls                    batches, epoch, validation, backward, log, save_checkpoint …
    each step → after_step            the ranks agree; what was requested is saved before the next
    the end → detach                  on_train_end; everything is removed again

The file is long because it is the list of what a loop may call, each with its contract.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from signal import Signals
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakSet

import torch

from hookline.arguments import (
    as_reason,
    check_flag,
    check_instance,
    check_mapping,
    check_name,
    check_path,
    check_whole_number,
    describe_value,
)
from hookline.context import LazyFloat
from hookline.dispatch import HookManager
from hookline.dispatch.calling_hook import is_firing
from hookline.errors import (
    ArgumentError,
    HooklineError,
    LoopError,
    NotProvidedError,
    StopTraining,
    listed,
)
from hookline.files import is_plain_name
from hookline.hook import Hook
from hookline.integrations.bare_loop.data_watch import DataWatch
from hookline.integrations.bare_loop.generation import GenerationWatch
from hookline.integrations.bare_loop.loop_checks import CALLS, Requirements, saves_checkpoints
from hookline.integrations.bare_loop.loop_phases import Batch, LoopPhases
from hookline.integrations.bare_loop.optimizer_watch import AwaitedOptimizer
from hookline.integrations.bare_loop.step_watch import StepWatch
from hookline.integrations.bare_loop.stop_request import StopRequest
from hookline.interrupts import AllowedInterrupts, HeldInterrupts, remember_interrupt
from hookline.loop.control_requests import SaveRequest, includes_full_save
from hookline.loop.evaluation import count_tokens, make_counter, samples_in
from hookline.loop.event_context import EventContext, device_of
from hookline.loop.loop import Loop, Phase, announce, report_checkpoint
from hookline.loop.model_watch import ForwardTargets, models_in, unwrapped
from hookline.loop.phase_times import PhaseTimes
from hookline.loop.processes import is_main_process, local_rank
from hookline.loop.random_state import describe_random_state, restore_random_state
from hookline.loop.rank_sync import RankSync, is_sharded_loop, join_ranks, trains_together
from hookline.loop.record import Record
from hookline.loop.signals import TerminationWatch
from hookline.loop.state import (
    StateItem,
    compare_gradients,
    load_gradients,
    save_gradients,
)

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.session_saves import SessionSaves
    from hookline.runs.identity import Identity
    from hookline.runs.run import Kind, Run

log = logging.getLogger("hookline")
T = TypeVar("T")

_attached: WeakSet[Session] = WeakSet()

_STATE = (  # what a checkpoint of the loop's own, or of another library, has of a session
    *("hooks", "attributes", "disabled", "step", "best_accuracy", "run", "logged", "unreported"),
    *("means", "tokens_seen", "epoch", "step_of"),
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was loaded into a bare loop, which continues its data from here.

    Attributes:
        path: the checkpoint.
        step: completed steps.
        epoch: the epoch in progress, or the next one after the end of an epoch; None if the loop
            did not provide epochs.
        extra: what the loop gave to `save_checkpoint(extra=…)`.
    """

    path: Path
    step: int
    epoch: int | None
    extra: dict[str, Any]
    _random: Mapping[str, Any] | None = field(repr=False)
    _device: torch.device = field(repr=False)

    def restore_random_state(self) -> None:
        """Restore the random states of Python, NumPy and torch once more.

        Loading has restored them. Call this before the next step if the loop draws random numbers
        to find its data again, such as by iterating over a shuffled loader. Of several processes,
        each has its own states if all of them have saved together. If rank 0 has saved alone, the
        others keep theirs.
        """
        if self._random is not None:
            restore_random_state(dict(self._random), self._device)


class Session:
    """The result of `attach`: the handle to detach, and the calls that give hooks more.

    It is a context manager: entering it starts training (`on_train_start`), leaving it ends
    training and detaches. Without `with`, training starts with the first call that is seen, and
    `detach()` ends it. Hooks get it as `trainer`, and may set attributes of their own on it.

    Args:
        names: of the optimizers, if they have any.
        options: those of `attach`, checked.
        accumulated_batches: by which number losses are divided for accumulation; 0 if unknown.
        step_of: the number of the optimizer whose step ends a step; None if the user has not said.

    Attributes:
        model: the model.
        optimizers: the optimizers.
        schedulers: the learning-rate schedulers.
        scaler: the GradScaler; None without one.
        config: the configuration.
        hooks: the hooks.
        run: the run and its folder; None without `attach(…, runs=…)`, before training starts, and
            on ranks other than the first.
        started: whether training has started.
        has_ended: whether training with these hooks has ended.
        is_in_block: whether a `with` block of this session is being run.
        has_failed_to_start: whether it has ended in `attach` or `on_train_start`.
        is_quiet: whether it does not say where its run is, and that training was stopped.
    """

    _finds_batches = True  # else another library's trainer tells of them

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        schedulers: list[Any],
        scaler: torch.amp.GradScaler | None,
        *,
        names: tuple[str, ...] = (),
        options: SimpleNamespace,
        accumulated_batches: int = 0,
        step_of: int | None = None,
    ) -> None:
        self.model, self.optimizers = model, optimizers
        self.schedulers, self.scaler, self._names = schedulers, scaler, names
        self.hparams, self.name, self.tags = options.hparams, options.name, options.tags
        self.config = SimpleNamespace(debug=False) if options.config is None else options.config
        self.run: Run | None = None
        self._runs, self._wants_report = options.runs, options.report
        self._loss_divided, self._accumulated_batches = options.loss_divided, accumulated_batches
        self._step_of = step_of
        self._requirements = Requirements()
        given = {"config": options.config, "run": options.runs}
        self._requirements.provided = {n for n, value in given.items() if value is not None}
        self.hooks, self.loop = self._make_loop(options)
        tokens = options.tokens
        own_count = None if tokens is None or isinstance(tokens, str) else make_counter(tokens)
        count = count_tokens if isinstance(tokens, str) else own_count
        self._requirements.counts_batches = own_count is not None
        self._data: DataWatch | None = None
        self._phases = LoopPhases(self, self._requirements, count)
        self._batch_idx = 0  # of the next batch, where another library's trainer counts them
        self._stop = StopRequest(self.loop.requests, options.on_stop)
        self._saves: SessionSaves | None = None  # made when it is needed
        self._restored: tuple[Path, Mapping[str, Any]] | None = None  # the checkpoint, its state
        self._unreported: list[Any] = []  # values of steps that were not recorded when it was saved
        self._identity: Identity | None = None
        self._undo = ExitStack()  # what was attached to model, optimizers and scaler, and the run
        self._termination: TerminationWatch | None = None
        self._saves_at_signal = False  # a signal saves a last checkpoint
        self._handler_cleanup: weakref.finalize[..., Session] | None = None
        self._generation: GenerationWatch | None = None
        self.started = self.has_failed_to_start = False
        self.has_ended = self.is_in_block = self.is_quiet = False
        self._has_left = False  # hooks are called no more
        self._warned_no_run = False
        if optimizers:
            self._describe()
            for other in list(_attached):
                if self._trains_like(other) and self.describe() == other.describe():
                    self.replace(other)
            self._connect()

    def _make_loop(self, options: SimpleNamespace) -> tuple[HookManager, Loop]:
        context = EventContext(self, self._requirements.read_absent)
        context.connect(self.model, self.optimizers)
        context.optimizer_names = self._names
        context.provide("config", options.config)
        if self._runs is not None:
            context.run = None  # until training starts, and on ranks other than the first
        manager = HookManager(source=context, settings=options.settings)
        manager.raise_on_missing_args = True  # until the first step
        manager.set_process(is_main=is_main_process(), is_local_main=local_rank() == 0)
        manager.register_hooks(options.hooks)
        loop = Loop(
            context,
            manager,
            Record(options.runs, options.trackers),
            options.checkpoints,
            no_folder=LoopError(
                "There is no run folder to save into. Give a path: `save_checkpoint('…')`, or a "
                "folder for runs: `attach(…, runs='runs')`."
            ),
        )
        return manager, loop

    # -- attaching --------------------------------------------------------------------------------

    def _trains_like(self, other: Session) -> bool:
        """Return whether another session is attached to the same models and optimizers.

        One in a `with` block will end there, and so may have another within.
        """
        mine, others = (
            list(map(id, [*models_in(session.model), *session.optimizers]))
            for session in (self, other)
        )
        return mine == others and not other.has_ended and not other.is_in_block

    def describe(self) -> str:
        """Return what makes two sessions equal: their hooks with options, and where they write."""
        from hookline.runs.jsonable import canonical_json

        hooks = [
            [hook.name, hook.cls, hook.schedule, hook.events, hook.unmasked_options]
            for hook in self.hooks.describe()
        ]
        return canonical_json([*hooks, self._runs, self.name])

    def replace(self, other: Session) -> None:
        """End a session that was attached by an equal call, so that hooks are called once."""
        log.warning(
            "An equal session (hooks: %s) was attached already, after step %d. It ends now, and "
            "this one replaces it. To end it yourself, call session.detach(), or use `with "
            "hookline.attach(…):`.",
            *(listed(other.hooks.list_hooks()), other.step),
        )
        if other.started:
            other.stop("an equal session has replaced it")
        try:
            other.detach()
        except HooklineError:
            log.exception("A hook failed at the end of the session that was replaced.")

    def _describe(self) -> None:
        """Describe what is trained, and its configuration, before anything changes them."""
        if self.loop.record.is_wanted and self._identity is None:
            self._identity = self._make_identity()

    def _make_identity(self) -> Identity:
        from hookline.runs.identity import Identity, describe_training, list_parameters
        from hookline.runs.jsonable import to_jsonable

        given = to_jsonable(self.loop.context.known("config"))
        config = given if isinstance(given, dict) else {} if given is None else {"config": given}
        training, names = describe_training(self), list_parameters(self)
        return Identity(config, training, names, self.name, self.tags, self.hparams)

    def _connect(self, called: ForwardTargets | None = None) -> None:
        """Watch the model and the optimizers; if that fails, they are as before."""
        loop, state = self.loop, self.loop.state
        is_given = not any(isinstance(each, AwaitedOptimizer) for each in self.optimizers)
        state.model, state.optimizers = unwrapped(self.model), self.optimizers if is_given else []
        state.schedulers, state.scaler = self.schedulers, self.scaler
        state.late.expects_optimizers, state.late.expects_scaler = not is_given, True
        if self._finds_batches:
            self._data = DataWatch(self, self._phases, self._requirements)
        watch = self._watch = self._phases.watch = StepWatch(
            self,
            self._requirements,
            self._phases,
            called=called,
            loss_divided=self._loss_divided,
            accumulated_batches=self._accumulated_batches,
            step_of=self._step_of,
            data=self._data,
        )
        generation = self._generation = GenerationWatch(loop.context)
        loop.watch, loop.on_fork = watch.hooks_changed, self._leave_in_fork
        this = weakref.proxy(self)
        state.add_items = lambda: this.state_items()
        undo = self._undo.callback
        try:
            with HeldInterrupts():
                # Each is undone also if it fails halfway; what has not begun is left alone.
                undo(self._leave_cycles)
                undo(self._stop_watching_termination)
                undo(self._close_record)
                undo(self._close_checkpoints)
                undo(self._stop_listening)
                _attached.add(self)
                undo(generation.stop)
                generation.start()
                undo(watch.detach)
                watch.attach()
                undo(loop.close_probes)
                loop.phase = Phase.BETWEEN_STEPS
                loop.listen()
        except BaseException as error:
            self.abandon(error)
            raise

    def state_items(self) -> list[StateItem]:
        """Return the items of a checkpoint's state that our own trainer does not have, or else."""
        record, records, saves = self.loop.record, self.loop.ranks.records, self._saves
        watch, rule = self._watch, self._watch.rule

        def load_random(state: Any) -> None:
            if state:
                restore_random_state(state, device_of(self.model))

        # Gradients that wait for optimizers which step less often than another one.
        def save_waiting() -> list[list[Any] | None]:
            waits = [rule.ends_with not in (None, i) for i in range(len(self.optimizers))]
            return save_gradients(self.optimizers, waits)

        def load_waiting(saved: list[list[Any] | None]) -> None:
            if not watch.awaits_optimizer:
                load_gradients(self.optimizers, saved)
            elif any(saved):
                log.warning(
                    "The checkpoint has gradients that wait for an optimizer which is not known "
                    "yet, so they are not restored. Give it: attach(model, optimizers, …)."
                )

        def compare_waiting(saved: list[list[Any] | None]) -> list[str]:
            return [] if watch.awaits_optimizer else compare_gradients(self.optimizers, saved)

        save_random = dict if saves is None else saves.random
        load_unreported = partial(setattr, self, "_unreported")
        return [
            *self._phases.state_items(),
            StateItem("step_of", lambda: rule.ends_with, rule.load),
            StateItem("logged", record.unwritten_values, record.load_unwritten_values),
            StateItem("unreported", records.own_values, load_unreported),
            StateItem("extra", lambda: dict(self.loop.checkpoints.extra)),
            StateItem("random", save_random, load_random, _own_random, describe_random_state),
            # Last, because undoing a load that has failed leaves gradients as they are.
            StateItem("pending_gradients", save_waiting, load_waiting, compare=compare_waiting),
        ]

    def refuse(self, error: HooklineError) -> None:
        """End the session before the first step: hooks would not get what they need."""
        if not self.is_in_block:  # which the error leaves
            self.has_failed_to_start = True
            self.__exit__(type(error), error, None)

    def allow_missing(self) -> None:
        """Warn instead of refusing the loop: hooks are not called for what they do not get."""
        self._watch.checks.allow_missing = True
        self.hooks.raise_on_missing_args = False

    def abandon(self, error: BaseException | None) -> None:
        """Undo `attach`, which has failed or was not followed by training, without any event."""
        with HeldInterrupts():
            status = "stopped" if error is None else self._status_after(error)
            self.loop.context.status = status
            self.has_ended = self.has_failed_to_start = True
            self._leave_loop()

    def _leave_loop(self) -> None:
        """Undo all that was attached, and close the run; Ctrl-C and SIGTERM wait for that."""
        with HeldInterrupts(), HeldInterrupts(Signals.SIGTERM):
            self.loop.phase = Phase.IDLE
            self._undo.close()

    def _stop_listening(self) -> None:
        """Have nothing attached again when hooks are toggled later."""
        self._has_left = True
        _attached.discard(self)
        self.loop.stop_listening()
        self.hooks.run_ended()
        self.loop.stay_in_forks()

    def _stop_watching_termination(self) -> None:
        if self._termination is not None:
            self._termination.__exit__()
        if self._handler_cleanup is not None:
            self._handler_cleanup.detach()

    def _close_checkpoints(self) -> None:
        if self._saves is not None:
            self._saves.leave()
        self.loop.close_checkpoints()

    # -- start and end ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._check_not_ended()
            self.is_in_block = True
            self.begin()
            return self  # noqa: TRY300  Ctrl-C may come before this
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end_after(error)
        except BaseException as later:
            if not self.has_ended:  # Ctrl-C before anything was done
                self._end_after(later)
            raise

    def _end_after(self, error: BaseException | None) -> None:
        """End training, after this error, if there is one."""
        if error is None or self.has_ended:
            self.detach()
            return
        self.hooks.raise_on_missing_args = False  # one error is enough
        self._set_failed(error)
        if self.loop.ranks.is_distributed and self.status != "preempted":
            self.loop.ranks.processes.report_error(error)
        try:
            _end_quietly(self._fire_exception)
        finally:  # also after a second Ctrl-C
            _end_quietly(self.detach)

    def _set_failed(self, error: BaseException) -> None:
        self.loop.context.exception = error
        self.loop.context.status = self._status_after(error)

    def _status_after(self, error: BaseException) -> str:
        """Return how training ends with this exception."""
        if self._termination is not None and self._termination.has_received:
            return "preempted"
        if isinstance(error, SystemExit | GeneratorExit | StopTraining):
            return "stopped"  # leaving early is not a failure
        return "interrupted" if isinstance(error, KeyboardInterrupt) else "error"

    def _fire_exception(self) -> None:
        if self.started and self.status not in ("stopped", "preempted"):
            self.fire("on_exception")

    def begin(self) -> None:
        """Start training; nothing happens after the first call, which the session makes itself."""
        if not self.started:
            self._check_not_ended()
            with HeldInterrupts():
                try:
                    self._start()
                except BaseException as error:
                    self.has_failed_to_start = True
                    self.__exit__(type(error), error, error.__traceback__)
                    raise

    def _start(self) -> None:
        """Start training; an error ends the session, and model and optimizers are as before."""
        loop, context = self.loop, self.loop.context
        with AllowedInterrupts():
            self._join_ranks()
        self._start_saving()
        with AllowedInterrupts():
            self._start_record()
        self._undo.callback(_detach_at_exit(self))
        self.started = True
        loop.phase = Phase.IN_STEP
        loop.leave_in_forks()
        self._watch_termination()
        self.hooks.run_started()
        with AllowedInterrupts():
            known = context.known("epoch"), context.known("tokens_seen")
            context.epoch, context.tokens_seen = (number or 0 for number in known)  # known here
            self.fire("on_train_start")
            context.provide("epoch", known[0])
            context.provide("tokens_seen", known[1])
            if self._restored is not None:
                self._fire_load()
        self._watch.start()

    def _check_not_ended(self) -> None:
        if self.has_ended:
            raise LoopError(
                "This session has ended, so its hooks would not be called. Attach again: "
                "`with hookline.attach(…) as session:`."
            )

    def _join_ranks(self) -> None:
        """Agree with the other processes that train the model, if there are any."""
        wrapper, loop = self._watch.called.wrapper, self.loop
        if not trains_together(self.model if wrapper is None else wrapper, self.optimizers):
            return
        processes = join_ranks(self.hooks)
        loop.ranks = RankSync(processes, self.hooks, loop.context)
        loop.ranks.begin()
        loop.is_sharded = is_sharded_loop(self.optimizers)
        self._watch.always_sees_calls = True
        self._stop.needs_agreement = True
        self._watch.look_at_skips()
        self._watch.has_boundary_work = True
        if loop.is_sharded:
            self._make_saves()  # in all processes, because a hook of any may ask for one

    def _start_saving(self) -> None:
        """Prepare for hooks that save."""
        if any(saves_checkpoints(self.hooks.get_hook(name)) for name in self.hooks):
            self._requirements.provided |= {"checkpoint", "resumed"}  # they cause these events
            self._make_saves()
            self._saves_at_signal = self._runs is not None

    def _start_record(self) -> None:
        loop, record = self.loop, self.loop.record
        if not record.is_wanted or not is_main_process():
            return
        from hookline.runs.location import shorten_path
        from hookline.runs.run import Run

        self._describe()
        assert self._identity is not None
        restored, state = self._restored or (None, {})
        position, is_own = state.get("run"), isinstance(self._runs, Run)
        record.begin(
            self._identity,
            self.hooks.describe(),
            seed=self._identity.config.get("seed"),
            device=device_of(self.model),
            step=None if is_own and restored is None else self.step,
            resumed_run=None if restored is None else self._find_resumed_run(restored),
            restored=restored,
            position=position,
        )
        if is_own and restored is not None:
            record.rewind(position or {"step": self.step})
        self._record_unreported()
        self.run = record.run
        if record.run is not None:
            loop.context.run = record.run
            record.start_monitor(
                device_of(self.model), self.hooks, lambda: loop.context.known("tokens_seen")
            )
            self._watch.times = record.phases
            if not self.is_quiet:
                announce(f"run {shorten_path(record.run.path)}")

    def _record_unreported(self) -> None:
        """Write the values that were kept for a mean over all ranks when a checkpoint was saved."""
        unreported, self._unreported = self._unreported, []
        for step, epoch, name, value in unreported:
            self.loop.record.value(step, epoch, name, value, "scalar")

    def _find_resumed_run(self, restored: Path) -> Path | None:
        """Return the folder of the run that the checkpoint belongs to."""
        from hookline.runs.location import find_run_of_checkpoint

        run_id = (self._restored or (None, {}))[1].get("run_id")
        if isinstance(self._runs, str) and is_plain_name(run_id):
            folder = Path(self._runs) / run_id
            return folder if (folder / "manifest.json").is_file() else None
        return find_run_of_checkpoint(restored)

    def _watch_termination(self) -> None:
        """Leave the loop at SIGTERM and SIGUSR1; where the user's own handler does, notice it."""
        # It is known here before it is entered: the signal may come at once.
        this = weakref.proxy(self)
        self._termination = TerminationWatch(self.loop.requests, lambda: this.end_soon())
        self._termination.__enter__()
        # A session that nobody detaches is freed with its model, and must leave no handler.
        self._handler_cleanup = weakref.finalize(self, self._termination.__exit__)
        self._handler_cleanup.atexit = False

    def end_soon(self) -> bool:
        """Record a signal; return whether the loop goes on until the next boundary, to save."""
        self._watch.has_boundary_work = True
        received = self.loop.requests.signal
        self.loop.record.event("signal", step=self.step, signal=received and received.name)
        return self._saves_at_signal

    def _leave_for_signal(self) -> None:
        """Save what a resumed run needs at the boundary after this step, and leave the loop."""
        assert self._termination is not None
        if not self._saves_at_signal:
            self._termination.exit()  # again: somebody has swallowed it
            return
        self._saves_at_signal = False
        self._termination.follow()
        saves = self._make_saves()
        self._request_last_save()
        saves.on_saved = self._saved_for_signal
        saves.wait_for_boundary()

    def _request_last_save(self) -> None:
        """Request a checkpoint in the run's folder, unless a hook has."""
        folder, requests = None if self.run is None else self.run.checkpoints, self.loop.requests
        if not includes_full_save(requests.checkpoints, folder):
            requests.checkpoint(SaveRequest())

    def _saved_for_signal(self, path: Path | None) -> None:
        """Say how to continue, and leave the loop, if it has not ended by itself."""
        assert self._termination is not None
        requests = self.loop.requests
        if path is not None:
            received = requests.signal or Signals.SIGTERM
            announce(
                f"{received.name}: saved {path}. To continue it, call `session.load_checkpoint()` "
                "before training starts."
            )
        self.loop.ranks.wait_for_save(requests.seconds_before_kill())
        if not self.has_ended:
            self._termination.exit()

    def detach(self) -> None:
        """End training (`on_train_end`) and remove all hooks from model, optimizers and scaler."""
        if self.has_ended:
            return
        context = self.loop.context
        with HeldInterrupts():
            self.has_ended = True
            try:
                with AllowedInterrupts():
                    self._end_training()
            except BaseException as error:
                if context.exception is None:
                    self._set_failed(error)
                raise
            finally:
                self._leave_loop()
        if context.status == "stopped" and self._stop.is_active and not self.is_quiet:
            reason = f": {self._stop.reason}" if self._stop.reason else ""
            announce(f"stopped after {context.step} steps{reason}")
        if context.status in ("completed", "stopped"):
            for line in self._requirements.pending(self.hooks):
                log.warning("The loop has ended. %s", line)
            if self.started and self._watch.awaits_optimizer:
                self._watch.checks.warn_of_no_optimizer(
                    "The loop has ended, and no optimizer has stepped"
                )

    def _end_training(self) -> None:
        """Save what was requested, and fire `on_train_end`."""
        loop, context = self.loop, self.loop.context
        together = False
        if context.status == "training":
            ends_early = self._stop.is_active and not self._stop.is_ignored
            context.status = "stopped" if ends_early else "completed"
            if self._termination is not None and self._termination.has_received:
                context.status = "preempted"
            together = loop.ranks.end_together(loop.record.sink)
        try:
            self._finish_checkpoints(together=together)
        except BaseException as error:  # hooks are told that training ends in any case
            together = False
            if context.exception is None:
                self._set_failed(error)
            raise
        finally:
            if self.started and together:  # in all processes or in none: a hook of rank 0 may save
                self._make_saves()
                loop.checkpoints.serve_end(lambda: self.fire("on_train_end"))
            elif self.started:
                self.fire("on_train_end")

    def _finish_checkpoints(self, *, together: bool) -> None:
        """Save what was requested, and report it, also to the other processes."""
        if self._saves is not None:
            status, exception = self.status, self.loop.context.exception
            failed = status in ("error", "interrupted")
            if status == "preempted":
                within_step = exception is not None and not self._watch.is_between_steps
                failed = within_step
                if self._saves_at_signal and not failed and not self.loop.ranks.is_distributed:
                    self._request_last_save()
                    self._saves.on_saved = self._saved_for_signal
            self._saves.finish(failed=failed, together=together)
        if together:
            self._agree()  # on the checkpoints that have just been finished
            if self._saves is not None:
                self._saves.save_requested()

    def _leave_in_fork(self) -> None:
        self.has_ended = True
        self._stop.needs_agreement = False
        if self._saves is not None:
            self._saves.leave()
            self._saves = None
        self._watch.leave()
        if self._generation is not None:
            self._generation.stop()

    def _leave_cycles(self) -> None:
        """Let what this session refers to, as the model, be freed without the garbage collector."""
        context = self.loop.context
        context.trainer = weakref.proxy(self)
        self.hooks.source = weakref.proxy(context)
        self.loop.watch = self.loop.on_fork = None
        self._generation = self._termination = context.exception = None
        self._saves = None
        self._phases.session = weakref.proxy(self)
        self._data = None
        self._watch.leave_cycles()

    def _close_record(self) -> None:
        """End the run, if there is one, and write its report."""
        loop, context = self.loop, self.loop.context
        if loop.record.sink is None:
            return
        error = context.exception
        if context.status == "preempted":  # no failure, and there is little time left
            error, self._wants_report = None, False
        loop.close_record(error, self._stop.reason)
        self._watch.times = PhaseTimes()
        if self.run is not None:
            from hookline.report.document import write_report_at_end

            with AllowedInterrupts():
                made = write_report_at_end(self.run, context.status, wanted=self._wants_report)
            if made is not None:
                announce(f"report {made}")

    # -- the end of a step ------------------------------------------------------------------------

    def after_step(self) -> None:
        """Do what is rarely needed at the end of a step, or where several processes train."""
        if self._saves is not None:
            self._saves.event_ended()
            if self.loop.checkpoints.prepares:  # the memory for what a hook will save
                self.loop.checkpoints.prepare()
        has_signal = self._agree()
        if self._termination is not None and has_signal:
            self._leave_for_signal()
        if self._stop.is_active:
            self._stop.check()

    def _agree(self) -> bool:
        """Apply what hooks of any process have requested; return whether one has a signal."""
        loop, step = self.loop, self.step
        if not loop.ranks.is_distributed:
            if loop.has_checkpoints and loop.checkpoints.is_busy:
                loop.checkpoints.report()
            return loop.requests.signal is not None
        if loop.ranks.records.is_due(step):
            loop.ranks.records.report(loop.record.sink)
        agreed = loop.agree()
        if agreed.stop:
            if self._stop.reason is None:
                loop.record.stop_requested(step, "another process asked for it")
            self._stop.agree(step)
        if agreed.save:
            self._make_saves().wait_for_boundary()
        return agreed.signal

    def _make_saves(self) -> SessionSaves:
        """Return what saves and loads checkpoints; importing it takes long."""
        if self._saves is None:
            from hookline.integrations.bare_loop.session_saves import SessionSaves

            self._saves = SessionSaves(self.loop, self._watch)
            self._watch.always_counts_calls = True  # saves happen between them
            if not self.has_ended:
                self._watch.watch_model()
        self._watch.has_boundary_work = True
        return self._saves

    def reach_boundary(self) -> None:
        """Save what hooks have requested: the loop is between two steps."""
        if self._saves is not None:
            self._saves.save_requested()

    def _fire_load(self) -> None:
        if self._restored is not None:
            self.loop.context.checkpoint_path = self._restored[0]
            self.fire("on_checkpoint_load")

    def fire(self, event: str) -> None:
        """Fire an event, and see to what hooks have requested in it."""
        dispatch = getattr(self.hooks.dispatchers, event)
        if dispatch is None or self._has_left:
            return
        try:
            dispatch(self.loop.context)
            self._event_ended()
        except NotProvidedError:
            if self.hooks.raise_on_missing_args:  # for all that is known by now
                needs = CALLS if event.startswith("on_train_batch") else ("config", "run")
                self._watch.checks.raise_or_warn(list(self._requirements.unmet(self.hooks, needs)))
            raise

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
    def best_accuracy(self) -> float:
        """The best `val/accuracy` so far."""
        return self.loop.state.best_accuracy

    @best_accuracy.setter
    def best_accuracy(self, accuracy: float) -> None:
        self.loop.state.best_accuracy = accuracy

    # -- hooks ------------------------------------------------------------------------------------

    @property
    def hook_manager(self) -> HookManager:
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

    # -- requests ---------------------------------------------------------------------------------

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
        if self._stop.reason is None:
            self.loop.record.stop_requested(self.step, reason)
        self._ask_to_stop(reason)

    def _ask_to_stop(self, reason: str) -> None:
        self._stop.make(reason, self.loop.context.step_in_progress)
        self._watch.has_boundary_work = True

    def skip_optimizer_step(self, idx: int | None = None, reason: str = "a hook asked") -> None:
        """Skip the next step of an optimizer, or of all of them.

        Its gradients are removed just before the step, which then changes nothing.

        Args:
            idx: the optimizer's number; None for all.
            reason: given to `on_step_skipped`.
        """
        self.loop.requests.skip(idx, reason, len(self.optimizers))
        self._watch.look_at_skips()

    # -- what a loop may call ---------------------------------------------------------------------

    def batches(self, loader: Iterable[T], name: str | None = None, idx: int = 0) -> Iterator[T]:
        """Iterate over a loader, and fire the events of each batch.

        A batch that completes a step ends with `optimizer.step()`, others when the next is loaded.

        Args:
            loader: anything to iterate over.
            name: the loader's name; "train", or "val" within `validation()`.
            idx: its number, where a loop has several.
        """
        batches = iter(loader)
        self.begin()
        self._requirements.provided.add("batches")
        phases = self._phases
        trains = phases.validation is None
        if self._stop.is_active and trains:
            return
        if trains:
            self.reach_boundary()
        for i, batch in enumerate(batches):
            if self._data is not None:
                self._data.take(batch, trains=trains)
            phases.begin_batch(Batch(batch, i, idx, name or ("train" if trains else "val")))
            yield batch
            phases.end_batch()
            if self._stop.is_active and trains:
                break
            if trains:
                self.reach_boundary()
        phases.set_batch(None)

    def sample_indices(self, loader_idx: int, batch_idx: int) -> Any:
        """Return the indices of the batch in progress in its dataset; None if unknown.

        They are known for a torch `DataLoader` with a map-style dataset.
        """
        return None if self._data is None else self._data.sample_indices(loader_idx, batch_idx)

    @contextmanager
    def epoch(self, number: int | None = None) -> Generator[int]:
        """Mark an epoch; the value of `with … as` is its number, from 0."""
        if number is not None:
            check_whole_number("epoch(number)", number)
        self.begin()
        self.reach_boundary()
        self._requirements.provided.add("epoch")
        before = self.loop.context.known("epoch")
        epoch = number if number is not None else 0 if before is None else before + 1
        self._phases.begin_epoch(epoch)
        yield epoch
        self._end_epoch()

    def _end_epoch(self) -> None:
        self._phases.end_epoch()
        self._agree()

    @contextmanager
    def validation(self) -> Generator[None]:
        """Mark validation. What is logged within becomes `val/<name>`, as a mean.

        What is logged for a batch of `batches` counts as often as the batch has samples. Where
        several processes train together, the mean is that of all of them: each validates with its
        part of the batches, and these may be unequally many. If some processes do not validate,
        the others warn after a minute, and each has its own mean.

        Model mode, `no_grad` and random states are left to the loop.
        """
        self.begin()
        self.reach_boundary()
        self._requirements.provided.add("validation")
        phases, ranks = self._phases, self.loop.ranks
        training_batch, losses = phases.batch, self._watch.losses.of_batch
        phases.set_batch(None)
        means = phases.begin_validation()
        together = ranks.begin_validation()
        try:
            self.fire("on_validation_start")
            yield
            phases.end_validation(ranks.means(means) if together else means.means())
        finally:
            phases.leave_validation()
            phases.set_batch(training_batch)
            self._watch.losses.of_batch = losses
        if together:
            self._agree()

    def backward(self, loss: torch.Tensor, *, accumulate: int = 1, **options: Any) -> None:
        """Run backward, and give hooks the loss.

        Args:
            loss: the batch's own loss; it is divided and scaled here.
            accumulate: the number of batches in a step; the loss is divided by it.
            options: further arguments of `Tensor.backward`.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ArgumentError(f"A loss is a tensor with one element, not {describe_value(loss)}.")
        if not loss.requires_grad:
            raise ArgumentError("The loss has no gradient: it was computed from no parameter.")
        check_whole_number("backward(…, accumulate=…)", accumulate, 1, sys.maxsize)
        self.begin()
        self._requirements.provided.add("backward")
        divided = loss / accumulate if accumulate != 1 else loss
        self.loop.context.loss = divided
        self.fire("on_before_backward")
        scaled = self.scaler.scale(divided) if self.scaler is not None else divided
        self._watch.run_backward(loss, lambda: scaled.backward(**options))

    def updates(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Fire `on_gradients_ready` and run updates. Call it before clipping gradients.

        Without it, both happen just before `optimizer.step()`.

        Args:
            optimizer: whose gradients are complete, where several have backwards of their own; by
                default those of all.
        """
        if optimizer is not None and not any(optimizer is own for own in self.optimizers):
            raise LoopError(
                f"session.updates(optimizer) got {describe_value(optimizer)}, which is not one of "
                "the optimizers that were attached. Attach it too, or give one of them."
            )
        self.begin()
        self._watch.gradients_ready(optimizer)

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

    def save_checkpoint(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = False,
        weights_only: bool = False,
    ) -> Path | None:
        """Save models, optimizers, schedulers, scaler, hooks, counters and random states.

        Call it between two steps, when the schedulers have stepped. The state is copied now and
        written in the background; `on_checkpoint_save` is fired when the checkpoint is durable.
        What a hook asks for, or the loop within a step, is saved before the next step begins.

        Of several processes, rank 0 writes, and a sharded model (FSDP2) is written by all of them,
        each its shards. Call this in all processes together, so that the random state of each is
        saved; a hook may call it in rank 0 only.

        Args:
            path: the checkpoint's folder; None: `checkpoints/step_…` in the run's folder.
            extra: the loop's own values, which `load_checkpoint` returns.
            wait: until the checkpoint is durable.
            weights_only: save only the models' weights, from which no run can be resumed.

        Returns:
            The checkpoint's folder if it is durable already, else None.
        """
        self.begin()
        self._requirements.provided.add("checkpoint")
        saves = self._make_saves()
        folder = None
        if path is not None:
            folder = Path(check_path("save_checkpoint(path)", path, "a folder")).absolute()
        extra = {} if extra is None else check_mapping("save_checkpoint(…, extra=…)", extra)
        check_flag("save_checkpoint(…, wait=…)", wait)
        check_flag("save_checkpoint(…, weights_only=…)", weights_only)
        if weights_only and extra:
            raise LoopError("save_checkpoint(…, weights_only=True) has no place for `extra`.")
        request = SaveRequest(folder, weights_only)
        if self.loop.is_forked:
            return None
        if self.has_ended:
            return saves.save(request, extra, wait=True)
        is_in_hook = is_firing(self) and not self.loop.checkpoints.is_announcing
        if is_in_hook or self._watch.has_new_gradients:
            saves.request(request, extra)
            return None
        return saves.save(request, extra, wait=wait)

    def load_checkpoint(self, path: str | os.PathLike[str] = "auto") -> LoadedCheckpoint | None:
        """Restore what `save_checkpoint` has saved, and continue its run.

            session = hookline.attach(model, optimizer, runs="runs")
            start = session.load_checkpoint()
            with session:
                for step in range(start.step if start else 0, 1000):
                    ...

        The position in the data is the loop's: it continues from the returned step. All ranks have
        to call this.

        Args:
            path: a checkpoint or a run; or "auto" for the newest complete checkpoint of the newest
                unfinished run in the folder for runs that has the same name, configuration, model,
                optimizers and hooks. "auto" has to be loaded before training starts.

        Returns:
            Where the loop continues; None if "auto" has found nothing to continue.
        """
        path = check_path("load_checkpoint(path)", path, "a checkpoint, a run or 'auto'")
        path = os.fspath(path)
        if path == "auto" and self.started:
            raise LoopError(
                "load_checkpoint('auto') continues a run, but training has started in a new one. "
                "Load before that: `session = attach(…)`, `session.load_checkpoint()`, and then "
                "`with session:`."
            )
        self._describe()
        # Earlier versions described a loop when it started to train.
        others = [] if self._identity is None else [self._make_identity()]
        saves = self._make_saves()
        found = saves.find(path, self._runs, self._identity, others)
        if found is None:
            return None
        checkpoint, loaded = saves.load(found)
        self._requirements.provided.add("resumed")
        self._restored = found, checkpoint.state
        if self.started:  # else the run is continued when training starts
            if self.run is not None and checkpoint.info.get("run_id") == self.run.id:
                self.loop.record.rewind(checkpoint.state.get("run") or {"step": loaded.step})
                self._record_unreported()
            self._fire_load()
        return loaded

    def state_dict(self) -> dict[str, Any]:
        """Return the state of hooks, updates and counters, for a checkpoint of the loop's own.

            torch.save({"model": model.state_dict(), "hooks": session.state_dict()}, path)

        It has strings and tensors only, so that `torch.load(…, weights_only=True)` reads it.
        """
        from hookline.integrations.session_state import pack_state  # most loops save none

        return pack_state(self.collect_state())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, and continue its run; before training starts.

        `on_checkpoint_load` is fired when training starts.
        """
        from hookline.integrations.session_state import unpack_state

        path = self._find_loaded_path()
        self._restore_state(path, unpack_state(state_dict, path))
        self._requirements.provided.add("resumed")

    def collect_state(self) -> dict[str, Any]:
        """Return the state of hooks, counters and run, for a checkpoint that the loop writes."""
        run, state = self.run, self.loop.state.collect(only=_STATE)
        return {
            **state,
            "random": {},
            "batch_idx": 0 if self._phases.epoch_is_over else self._batch_idx,
            "run_id": None if run is None else run.id,
        }

    def _find_loaded_path(self) -> Path:
        """Return the path of the checkpoint that the loop has read, if it can be known."""
        return Path("<state_dict>")

    def _restore_state(self, path: Path, state: Mapping[str, Any]) -> None:
        if self.started:
            raise LoopError(
                "session.load_state_dict() continues a training run, but this one has started. "
                "Load before that: `session = attach(…)`, `session.load_state_dict(…)`, and then "
                "`with session:`."
            )
        self.loop.state.restore({name: state[name] for name in _STATE if name in state})
        self._restored = path, state

    def notify_checkpoint_saved(
        self, path: Any, *, step: int | None = None, epoch: int | None = None
    ) -> None:
        """Fire `on_checkpoint_save`: the loop has written a complete checkpoint of its own.

        Args:
            path: the checkpoint.
            step: after which step it was written, in this epoch; by default after the last one.
            epoch: the epoch.
        """
        check_path("notify_checkpoint_saved(path)", path, "the checkpoint")
        if step is not None:
            check_whole_number("notify_checkpoint_saved(…, step=…)", step)
        elif epoch is not None:
            raise ArgumentError("notify_checkpoint_saved(…, epoch=…) needs `step`, too.")
        self.begin()
        self._requirements.provided.add("checkpoint")
        if self._has_left:
            return
        loop, context = self.loop, self.loop.context
        is_latest = step is None or step == self.step
        report_checkpoint(
            *(context, self.hooks, loop.record, path),
            step=self.step if step is None else step,
            epoch=context.known("epoch") if step is None else epoch,
            tokens_seen=context.known("tokens_seen") if is_latest else None,
        )
        self._event_ended()

    def _event_ended(self) -> None:
        if self._saves is not None and not self.has_ended:
            self._saves.event_ended()

    def log(self, name: str, value: Any, kind: Kind = "scalar") -> None:
        """Give hooks and the run a number, or the run a value of another kind.

        A number whose name has no slash is in the batch's `metrics`, and its mean in those of the
        epoch or the validation; a run has it for each step, too. What is logged after
        `optimizer.step()` belongs to the step that has just ended, but is not in its `metrics`: a
        batch that completes a step ends there. A name with a slash, every other kind than a scalar,
        and what a hook logs is written to the run only, under its name.

        Args:
            name: its name; at the end of an epoch `train/<name>`, of validation `val/<name>`.
            value: a number, or a tensor with one element, which is not read before it is needed.
            kind: what the value is: a scalar, text, histogram or image.
        """
        loop, context = self.loop, self.loop.context
        if type(name) is not str or type(kind) is not str:
            check_name("session.log(name)", name)
            check_instance("session.log(…, kind=…)", kind, str, "a kind of value")
        if kind != "scalar" or "/" in name or is_firing(self):
            self.begin()
            if loop.record.sink is not None:
                loop.record.value(context.step, context.known("epoch"), name, value, kind)
            elif self.run is None and self._runs is None and not self._warned_no_run:
                self._warned_no_run = True
                advice = self._requirements.calls["run"]
                log.warning("'%s' and what is logged like it is not kept. %s", name, advice)
            return
        if not is_single_number(value):
            raise ArgumentError(
                f"session.log('{name}', …) takes a number or a tensor with one element, "
                f"not {describe_value(value)}."
            )
        self.begin()
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()  # the loop may change it in place
        batch, validation = self._phases.batch, self._phases.validation
        has_ended = batch.ended if batch is not None else self._watch.is_between_steps
        is_late = has_ended and validation is None
        if validation is not None:
            weight = 1.0 if batch is None else float(samples_in(batch.batch))
            validation.add(f"val/{name}", value, weight)
        else:
            context.means.add(f"train/{name}", value)
            self._log_in_step(f"train/{name}", value, is_late=is_late)
        if batch is not None and not is_late:
            batch.logged[name] = LazyFloat(value) if isinstance(value, torch.Tensor) else value

    def _log_in_step(self, name: str, value: Any, *, is_late: bool) -> None:
        """Record a number of the step in progress, or of one that has been recorded already."""
        record, ranks = self.loop.record, self.loop.ranks
        step, epoch = self.step, self.loop.context.known("epoch")
        if not is_late:
            record.add_to_step(name, value)
        elif not ranks.is_distributed:
            record.value(step, epoch, name, value, "scalar")
        elif record.is_wanted:
            ranks.records.add(step, epoch, name, value)

    def log_dict(self, values: Mapping[str, Any]) -> None:
        """Record several numbers with this step."""
        for name, value in check_mapping("log_dict(values)", values).items():
            self.log(name, value)


def _detach_at_exit(session: Session) -> Callable[[], None]:
    """End the session when the interpreter exits; return a function that cancels this.

    A script may use `attach` without `with` and never detach. The checkpoint that was requested in
    the last step is saved then, and the run gets its status.
    """
    reference, process = weakref.ref(session), os.getpid()

    def end() -> None:
        attached = reference()
        if attached is not None and process == os.getpid():  # a forked process has a copy only
            error = _uncaught_error()
            try:
                attached.__exit__(type(error) if error is not None else None, error, None)
            finally:
                if isinstance(error, KeyboardInterrupt):
                    remember_interrupt()

    atexit.register(end)
    if parent_process() is None:
        return partial(atexit.unregister, end)
    finalizer = Finalize(None, end, exitpriority=0)  # `multiprocessing` ends forks without atexit

    def cancel() -> None:
        atexit.unregister(end)
        finalizer.cancel()

    return cancel


def _uncaught_error() -> BaseException | None:
    """Return the exception that ended the script, or ends the function of a child process."""
    if hasattr(sys, "ps1"):  # interactive: the last exception has not ended the program
        return None
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or sys.exc_info()[1]
    return error if isinstance(error, BaseException) and not isinstance(error, SystemExit) else None


def _end_quietly(end: Callable[[], None]) -> None:
    """Call this; if a hook fails, the user's own error matters more, and is raised."""
    try:
        end()
    except HooklineError:
        log.exception("A hook failed at the end of training.")


def _own_random(saved: Any, processes: Any) -> Any:
    """Return the random state of this rank; a rank that has saved none keeps its own."""
    return saved[processes.rank] if processes.rank < len(saved) else None


def is_single_number(value: object) -> bool:
    """Return whether a value is a number, or a tensor with one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float | LazyFloat) and not isinstance(value, bool)
