"""Loop: a training run with hooks on it, whoever drives it.

Hookline's trainer, the watchers of a bare loop and the callbacks of other libraries' trainers tell
the loop what happens. Whatever any training run needs is here, or in an object that the loop has.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch

from hookline.context import Metrics, to_float
from hookline.dispatch import HookManager
from hookline.dispatch.failures import HookFailure
from hookline.errors import HooklineError
from hookline.interrupts import HeldInterrupts
from hookline.loop.control_requests import ControlRequests
from hookline.loop.event_context import EventContext, ProbeView
from hookline.loop.processes import SingleProcessGroup, is_main_process
from hookline.loop.rank_sync import RankSync
from hookline.loop.record import Record
from hookline.loop.state import LoopState, SavedAttributes
from hookline.printable import printable_message
from hookline.tensors.observation import Observation

if TYPE_CHECKING:
    from hookline.config.trainer_config import CheckpointConfig
    from hookline.loop.checkpoints import Checkpoints
    from hookline.probes.sync import ProbeSync

log = logging.getLogger("hookline")


class Phase(Enum):
    """The stage that a loop is in."""

    IDLE = auto()  # it does not train: probes are not attached
    STARTING = auto()  # a run begins; hooks have not been called yet
    BETWEEN_STEPS = auto()  # at a step boundary: edits are toggled, checkpoints saved at once
    IN_STEP = auto()  # within a step or the end of an epoch: both wait for its end


class Agreed(NamedTuple):
    """Requests that any rank has made, as all of them know them."""

    stop: bool
    save: bool
    signal: bool


class Loop:
    """A training run with hooks on it: where it stands, who listens, what it leaves on disk.

    Args:
        context: where the loop stands.
        hooks: who listens.
        record: what it leaves on disk.
        settings: how checkpoints are written.
        no_folder: the error for a checkpoint without a folder.
        processes: the processes that train together.
        is_sharded: whether each of them has a shard of each parameter.

    Attributes:
        attributes: attributes of the trainer or session that checkpoints keep.
        probes: attaches probes to the model as they are toggled; None if there are none.
        requests: what hooks and users ask of the loop.
        ranks: one process, or several.
        state: what a checkpoint has apart from the weights.
        phase: what the loop is doing.
        is_forked: whether this is the copy of a loop in a forked process: it does nothing.
        watch: watches what the enabled hooks need; called when hooks come, go or are toggled.
        on_fork: called in a forked process.
    """

    def __init__(
        self,
        context: EventContext,
        hooks: HookManager,
        record: Record,
        settings: CheckpointConfig,
        *,
        no_folder: HooklineError,
        processes: SingleProcessGroup | None = None,
        is_sharded: bool = False,
    ) -> None:
        self.context, self.hooks, self.record = context, hooks, record
        self.attributes = SavedAttributes(context.trainer)
        self.requests = ControlRequests(settings.grace_seconds)
        self.probes: ProbeSync | None = None
        self.ranks = RankSync(processes or SingleProcessGroup(), hooks, context)
        self.state = LoopState(context, hooks, record, self.attributes)
        self.phase = Phase.IDLE
        self.is_sharded = is_sharded
        self.is_forked = False
        self.watch: Callable[[], None] | None = None
        self.on_fork: Callable[[], None] | None = None
        self._settings, self._no_folder = settings, no_folder
        self._checkpoints: Checkpoints | None = None
        self._warned_of_transform = False

    def begin(self, record: Record, settings: CheckpointConfig) -> None:
        """Begin another run, which is recorded and saved like this."""
        self.record = self.state.record = record
        self._settings, self._checkpoints = settings, None

    def listen(self) -> None:
        """Watch what the enabled hooks need, from now on."""
        self.hooks.on_change = self.hooks_changed
        self.hooks.failures.on_failure = self._hook_failed
        self.hooks_changed()

    def stop_listening(self) -> None:
        """Do nothing any more when hooks are toggled: training has ended."""
        self.hooks.on_change = self.hooks.failures.on_failure = None

    # -- hooks that come, go and are toggled ------------------------------------------------------

    def hooks_changed(self) -> None:
        """Watch what the enabled hooks need, and write their status to the run."""
        if self.is_forked:
            return
        with HeldInterrupts():
            if self.watch is not None:
                self.watch()
            self.sync_probes()
        is_ending = self._checkpoints is not None and self._checkpoints.is_serving_end
        if self.ranks.is_distributed and (self.phase is not Phase.IDLE or is_ending):
            self.ranks.hooks_toggled = True
        self.record.hooks_changed(self.context.step, self.hooks.statuses())

    def _hook_failed(self, failure: HookFailure) -> None:
        self.record.hook_failed(self.context.step, failure)

    def end_step_of_probes(self, probes: ProbeSync) -> None:
        """End a step for the probes, and apply toggles of edits that waited for it."""
        probes.end_step()
        if probes.waiting:
            self.sync_probes(at_boundary=True)

    def sync_probes(self, *, at_boundary: bool = False) -> None:
        """Attach the probes that are enabled to the model, and detach the others.

        Within a step, edits wait: a backward may follow.
        """
        if self.probes is None and self.hooks.of_kind("probe"):
            from hookline.probes.sync import ProbeSync  # most loops have no probes

            self.probes = ProbeSync(self.hooks, self.context.model, ProbeView(self.context))
        if self.probes is not None:
            within_step = self.phase is Phase.IN_STEP and not at_boundary
            self.probes.sync(is_running=self.phase is not Phase.IDLE, within_step=within_step)
            if self.probes.waiting:
                self.requests.wake()

    def close_probes(self) -> None:
        """Remove all hooks of the probes from the model; what they have captured stays."""
        probes, self.probes = self.probes, None
        if probes is not None:
            probes.close()

    # -- the model's calls ------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Fire `on_before_forward`: the model's outermost call begins."""
        fire = self.hooks.dispatchers
        if fire.on_before_forward is not None:
            fire.on_before_forward(self.context)

    def after_forward(self, outputs: Any) -> None:
        """Call forward hooks and `on_after_forward`: the model's outermost call has returned."""
        fire, context = self.hooks.dispatchers, self.context
        if fire.forward is not None and not self._stands_aside():
            context.observation = Observation(outputs, "the model's outputs")
            fire.forward(context)
            context.observation = None
        if fire.on_after_forward is not None:
            context.outputs = outputs
            fire.on_after_forward(context)
            context.outputs = None  # or it would keep the graph alive

    def _stands_aside(self) -> bool:
        """Return whether forward hooks do not see this call: a functional transform runs it.

        Its tensors stand for others, and cannot be read or kept.
        """
        if not torch._C._are_functorch_transforms_active():
            return False
        if not self._warned_of_transform:
            self._warned_of_transform = True
            log.warning(
                "Forward hooks do not see calls of the model within functional transforms "
                "(torch.func.vmap, grad, jvp …). They see all others."
            )
        return True

    # -- epochs and validations -------------------------------------------------------------------

    def fire(self, event: str) -> None:
        """Fire an event by its name."""
        dispatch = getattr(self.hooks.dispatchers, event)
        if dispatch is not None:
            dispatch(self.context)

    def end_epoch(
        self, means: Mapping[str, Any], fire: Callable[[str], None] | None = None
    ) -> None:
        """Fire `on_epoch_end` with the means over all ranks, and record them.

        A driver that does more than `fire` when it fires an event gives its own function.
        """
        context = self.context
        context.event_metrics = Metrics({**means, **context.validated})
        (fire or self.fire)("on_epoch_end")
        self.record.epoch(context.step, context.known("epoch"), means)

    def end_validation(
        self, values: Mapping[str, Any], fire: Callable[[str], None] | None = None
    ) -> Metrics:
        """Fire `on_validation_end` with these metrics, keep and record them; see `end_epoch`."""
        context = self.context
        context.event_metrics = metrics = Metrics(values)
        (fire or self.fire)("on_validation_end")
        context.validated = dict.copy(metrics)
        self.record.metrics(context.step, context.known("epoch"), metrics)
        if "val/accuracy" in metrics:
            best, state = to_float(metrics["val/accuracy"]), self.state
            state.best_accuracy = max(state.best_accuracy, best)
        return metrics

    # -- a step boundary --------------------------------------------------------------------------

    def agree(self) -> Agreed:
        """Exchange with all ranks what was requested, toggled and saved: one exchange a boundary.

        Checkpoints that are durable are reported, and toggles of any rank are applied, in all.
        """
        requests, ranks, checkpoints = self.requests, self.ranks, self._checkpoints
        if checkpoints is not None and checkpoints.is_busy:
            checkpoints.report()
        stop, save, signal, toggled, saved = ranks.processes.any(
            requests.stop_reason is not None,
            bool(requests.checkpoints),
            requests.signal is not None,
            ranks.hooks_toggled,
            checkpoints is not None and checkpoints.has_unsent,
        )
        if saved:
            self.checkpoints.broadcast_saved()
        if toggled and ranks.is_distributed:
            ranks.apply_toggles()
        return Agreed(stop, save, signal)

    def stop(self, reason: str) -> None:
        """Request to stop training; the first reason is kept and recorded."""
        is_first = self.requests.stop_reason is None
        self.requests.stop(reason)
        if is_first:
            self.record.stop_requested(self.context.step, self.requests.stop_reason)

    # -- checkpoints ------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Checkpoints:
        """Saves the state; made when it is needed, because importing it takes long."""
        if self._checkpoints is None:
            from hookline.loop.checkpoints import Checkpoints

            self._checkpoints = Checkpoints(
                settings=self._settings,
                context=self.context,
                hooks=self.hooks,
                requests=self.requests,
                record=self.record,
                ranks=self.ranks,
                state=self.state,
                no_folder=self._no_folder,
                is_sharded=self.is_sharded,
            )
        return self._checkpoints

    @property
    def has_checkpoints(self) -> bool:
        """Whether something was saved, or will be."""
        return self._checkpoints is not None

    def close_checkpoints(self) -> None:
        """Wait for what is being written, and free the memory."""
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.close()

    # -- the end ----------------------------------------------------------------------------------

    def leave_in_forks(self) -> None:
        """Detach this loop, which begins to train, in every process that is forked from now on.

        A worker of a `DataLoader` is such a process, and so is one that the script forks itself:
        their copy of the loop must not call hooks or write to the run. A loop that has not begun is
        left alone, since a forked process may be the one that trains it.
        """
        _watch_forks()
        _training.add(self)

    def stay_in_forks(self) -> None:
        """Do nothing with this loop when a process is forked: it has ended."""
        _training.discard(self)

    def detach_in_fork(self) -> None:
        """Call no hook and write nothing any more: the parent of this forked process trains."""
        self.is_forked = True
        self.hooks.silence()
        if self.probes is not None:
            self.probes.silence()
        self.record.leave()
        self._checkpoints = None
        if self.on_fork is not None:
            self.on_fork()

    def close_record(self, error: BaseException | None, reason: str | None = None) -> None:
        """End the run, which also has what the hooks did."""
        context = self.context
        summary, epoch = self.hooks.summary(), context.known("epoch")
        self.record.close(context.status, reason, summary, error, context.step, epoch)


_training: WeakSet[Loop] = WeakSet()  # they are left in forked processes


def _detach_training() -> None:
    for loop in list(_training):
        loop.detach_in_fork()
    _training.clear()


@cache  # once
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_detach_training)


def loop_of(trainer: Any) -> Loop | None:
    """Return the loop of what hooks get as `trainer`; None for anything else, as in unit tests."""
    loop = getattr(trainer, "loop", None)
    return loop if isinstance(loop, Loop) else None


def processes_of(trainer: Any) -> SingleProcessGroup:
    """Return the processes that train together, of what hooks get as `trainer`."""
    loop = loop_of(trainer)
    return SingleProcessGroup() if loop is None else loop.ranks.processes


def report_checkpoint(
    context: EventContext,
    hooks: HookManager,
    record: Record,
    path: Any,
    *,
    step: int,
    epoch: int | None,
    tokens_seen: int | None,
) -> None:
    """Tell the run and the hooks that a checkpoint of this step is complete and durable.

    Training may be steps ahead of it.
    """
    record.event("checkpoint", path=str(path), step=step, tokens_seen=tokens_seen)
    if hooks.dispatchers.on_checkpoint_save is not None:
        at_save = copy.copy(context)
        at_save.step, at_save.checkpoint_path = step, path
        at_save.provide("epoch", epoch)
        hooks.dispatchers.on_checkpoint_save(at_save)
    for _, hook, is_enabled in hooks.of_kind("loop"):
        saved = getattr(hook, "checkpoint_saved", None)
        if saved is not None and not is_enabled:  # it has to know of its own when it is enabled
            saved(str(path))


def announce(text: str, say: Callable[[str], None] | None = None) -> None:
    """Tell users something, in rank 0: in the log if it is configured, else by `say` or stderr."""
    if not is_main_process():
        return
    if log.isEnabledFor(logging.INFO) and (say is not None or log.hasHandlers()):
        log.info("%s", text)
    elif say is not None:
        say(text)
    else:
        with suppress(OSError, ValueError, AttributeError):  # there may be no terminal
            print(printable_message(text), file=sys.stderr, flush=True)
