"""The record of a loop: its run, trackers, the values of steps, phase times and system samples.

Without a run and without trackers, nothing is recorded, and little is imported.
"""

from __future__ import annotations

import logging
import os
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from hookline.dispatch import HookInfo, HookManager, Summary
from hookline.dispatch.calling_hook import find_calling_hook
from hookline.dispatch.failures import HookFailure
from hookline.interrupts import AllowedInterrupts, HeldInterrupts
from hookline.loop.means import Means
from hookline.loop.phase_times import PhaseTimes

if TYPE_CHECKING:
    from hookline.loop.rank_sync import StepRecords
    from hookline.runs.identity import Identity
    from hookline.runs.run import Kind, Run
    from hookline.runs.system_sampler import SystemSampler

log = logging.getLogger("hookline")

_ALWAYS_RECORDED = 20  # failures of a hook, or skipped steps; then the 100th, 1000th, …
_MAX_TRACEBACK = 20_000  # characters


class Record:
    """Records a loop in a run's folder and in trackers, as far as it has them.

    Args:
        root: the folder of all runs, or a run that is open for writing. None: no run is written,
            and the start is only logged.
        trackers: the trackers of the loop, a `TrackerSet`; None if it has none.

    Attributes:
        is_wanted: whether values are recorded in a run or in trackers, by the first rank.
        run: the run; None without one, and after it has ended.
        sink: what values are logged to: the run, or one that is for trackers only.
        phases: the time of each phase, which is measured if there is a run.
        skipped_steps: how many steps optimizers have skipped.
    """

    def __init__(self, root: str | os.PathLike[str] | Run | None, trackers: Any = None) -> None:
        self._root, self._trackers = root, trackers
        self.is_wanted = root is not None or trackers is not None
        self.run: Run | None = None
        self.sink: Run | None = None
        self.phases = PhaseTimes()
        self.skipped_steps = 0
        self._sampler: SystemSampler | None = None
        self._tokens: Callable[[], int | None] = lambda: None
        self._sampled_tokens: tuple[int, float] | None = None  # at the last sample, and its time
        self._hook_seconds: Callable[[], dict[str, float]] = dict
        self._step_means = Means()  # of what the loop has logged since the last step
        self._hook_statuses: dict[str, str] = {}  # as they were written last
        self._counts = Counter[str]()
        self._warned_of_loss = False

    # -- the start --------------------------------------------------------------------------------

    def begin(
        self,
        identity: Identity,
        hooks: Sequence[HookInfo],
        *,
        seed: Any,
        device: torch.device,
        step: int | None = 0,
        resumed_run: Path | None = None,
        restored: Path | None = None,
        position: Mapping[str, int] | None = None,
        parent: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a run, and log its id, commit, configuration hash and hooks.

        Args:
            identity: describes what is trained.
            hooks: all hooks, in order.
            seed: the seed.
            device: where the model is trained.
            step: completed steps; None if unknown.
            resumed_run: the folder of the run that is resumed.
            restored: the checkpoint that was loaded.
            position: where the resumed run continues, from that checkpoint (`Run.rewind`). None:
                behind the records of `step`.
            parent: where a new run was forked from: `run_id`, `checkpoint` and `step`.
        """
        from hookline.masking import remember_secrets
        from hookline.runs.manifest import new_run_id
        from hookline.runs.run import Run, TrackerOnlyRun

        remember_secrets(identity.collect(hooks))
        fields = identity.describe(hooks)
        fields |= {"config_hash": identity.hash(hooks), "seed": seed, "device": device}
        fields |= {"name": identity.name, "tags": identity.tags}
        fields["parameter_names"] = list(identity.parameter_names)
        self._hook_statuses = {info.name: info.status for info in hooks}
        with HeldInterrupts():  # until it is known here what has to be closed
            if isinstance(self._root, Run):
                self.run = self._root
                self._hook_statuses = {}  # its manifest does not have these hooks
            elif resumed_run is not None:
                if position is None and step is not None:
                    position = {"step": step}
                fields["resumed_from"] = None if restored is None else restored.name
                self.run = Run.open(resumed_run, resume=True, position=position, **fields)
            elif self._root is not None:
                self.run = Run.create(self._root, parent=parent, **fields)
            self.sink = self.run
        run_id = new_run_id() if self.run is None else self.run.id
        if self.run is None and self._trackers is not None:
            self.sink = TrackerOnlyRun(run_id, parent, **fields)
        if log.isEnabledFor(logging.INFO):
            self._log_start(run_id, fields["config_hash"], hooks)
        self.event("start", step=step, resumed_from=None if restored is None else str(restored))
        if self._trackers is not None:
            self._trackers.start(self.sink, identity.hparams)
            if resumed_run is not None:
                self._trackers.rewind(step)

    def _log_start(self, run_id: str, hashed: str, hooks: Sequence[HookInfo]) -> None:
        from hookline.runs.environment import describe_commit, read_git_state

        git = read_git_state() if self.run is None else self.run.manifest.get("git") or {}
        log.info(
            "Run %s starts: git commit %s%s, config hash %s, hooks: %s",
            run_id,
            describe_commit(git),
            " with uncommitted changes" if git.get("dirty") else "",
            hashed,
            ", ".join(f"{info.name} ({info.status})" for info in hooks) or "none",
        )

    def start_monitor(
        self, device: torch.device, hooks: HookManager, tokens: Callable[[], int | None]
    ) -> None:
        """Sample the system and time the phases from now on, if a run is written."""
        if self.run is not None:
            from hookline.runs.system_sampler import SystemSampler

            with HeldInterrupts():  # it has a thread
                self._sampler = SystemSampler(self.run.path, device)
                self._cleanup = weakref.finalize(self, self._sampler.stop)
                self._cleanup.atexit = False
            self.phases, self._tokens = PhaseTimes(device), tokens
            self._sampled_tokens = None
            earlier = _hook_seconds(hooks, {})  # of a run before, with the same hooks
            self._hook_seconds = partial(_hook_seconds, hooks, earlier)

    # -- values -----------------------------------------------------------------------------------

    def value(self, step: int, epoch: int | None, name: str, value: Any, kind: Kind) -> None:
        """Record one value."""
        if self.sink is not None:
            self.sink.log(step, epoch, name, value, kind)

    def metrics(self, step: int, epoch: int | None, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of an epoch or a validation."""
        if self.sink is not None:
            self.sink.log_metrics(step, epoch, metrics)

    def epoch(self, step: int, epoch: int | None, means: Mapping[str, Any]) -> None:
        """Record the means of an epoch as `<name>_epoch`, apart from the values of its steps."""
        self.metrics(step, epoch, {f"{name}_epoch": value for name, value in means.items()})

    def add_to_step(self, name: str, value: Any) -> None:
        """Keep a number for the end of the step: its mean is recorded then."""
        if self.is_wanted:
            self._step_means.add(name, value)

    def end_step(
        self, step: int, epoch: int | None, loss: Any, records: StepRecords | None
    ) -> None:
        """Record the loss of a step, if it is known, and the means of what was logged in it.

        With `records`, they are kept there, for means over all ranks.
        """
        values = self._step_means.means()
        if loss is not None:
            values["train/loss"] = loss  # that of backward has precedence over a logged one
        elif step and self.sink is not None and not any("train/loss" in name for name in values):
            self._warn_of_loss()  # not before the first step: all were skipped
        self._warned_of_loss |= loss is not None  # a step without a loss is the exception then
        for name, value in values.items():
            if records is None:
                self.value(step, epoch, name, value, "scalar")
            else:
                records.add(step, epoch, name, value)
        if values:
            self._step_means = Means()
        self.sample(step, epoch)

    def _warn_of_loss(self) -> None:
        if not self._warned_of_loss:
            self._warned_of_loss = True
            log.warning(
                "The run has no train/loss: the loss of the steps cannot be seen in this loop. "
                "Let the session run backward (`session.backward(loss)`), or log it: "
                "`session.log('loss', loss)`."
            )

    def sample(self, step: int, epoch: int | None) -> None:
        """Record system use, phase times and tokens, if a sample was taken since the last time."""
        if self._sampler is not None and self._sampler.sample is not None:
            values: dict[str, float] = self._sampler.take()
            times = self.phases.take(self._hook_seconds())
            values |= {f"time/{phase}": seconds for phase, seconds in times.items()}
            if (tokens := self._tokens()) is not None:
                now = perf_counter()
                values["train/tokens_seen"] = tokens
                if self._sampled_tokens is not None:
                    before, then = self._sampled_tokens
                    values["train/tokens_per_second"] = (tokens - before) / (now - then)
                self._sampled_tokens = tokens, now
            if self.run is not None:  # always so, with a sampler: for type checkers
                self.run.log_metrics(step, epoch, values)

    def unwritten_values(self) -> dict[str, Any]:
        """Return what was logged since the last step was recorded, for a checkpoint."""
        return self._step_means.state_dict()

    def load_unwritten_values(self, state: dict[str, Any]) -> None:
        """Restore what `unwritten_values` returned."""
        self._step_means.load_state_dict(state)

    # -- events -----------------------------------------------------------------------------------

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event."""
        if self.run is not None:
            self.run.event(kind, **fields)
        if self._trackers is not None and kind == "checkpoint":
            self._trackers.checkpoint(fields["path"], fields["step"])

    def hooks_changed(self, step: int, now: Mapping[str, str]) -> None:
        """Record the status of the hooks that were added, removed or toggled."""
        if self.run is None:
            return
        removed = dict.fromkeys(self._hook_statuses.keys() - now, "removed")
        known = self._hook_statuses
        changed = {name: s for name, s in now.items() if known.get(name) != s} | removed
        if changed:
            self.run.event("hooks", step=step, hooks=changed, by=find_calling_hook())
        self._hook_statuses = dict(now)

    def hook_failed(self, step: int, failure: HookFailure) -> None:
        """Record a failure of a hook, with its traceback."""
        if self.run is not None and self._is_recorded(f"hook {failure.hook}"):
            self.run.event(
                "hook_failed",
                step=step,
                hook=failure.hook,
                event=failure.event,
                error=_mask(f"{type(failure.error).__name__}: {failure.error}"),
                traceback=_format_traceback(failure.error),
                failures=failure.failures,
            )

    def step_skipped(self, step: int, reason: str, optimizer_idx: int) -> None:
        """Record that an optimizer has not stepped."""
        if self.run is None:
            return
        self.skipped_steps += 1
        if self._is_recorded("skipped"):
            count = self.skipped_steps
            fields = {"reason": reason, "optimizer_idx": optimizer_idx, "count": count}
            self.run.event("step_skipped", step=step, **fields)

    def stop_requested(self, step: int, reason: str | None) -> None:
        """Record that a hook, or the program, asks training to stop."""
        self.event("stop", step=step, reason=reason, by=find_calling_hook())

    def _is_recorded(self, key: str) -> bool:
        """Count an event; return whether it is recorded: a few of them, if there are very many."""
        self._counts[key] = count = self._counts[key] + 1
        return count <= _ALWAYS_RECORDED or str(count).strip("0") == "1"

    # -- checkpoints ------------------------------------------------------------------------------

    def rewind(self, position: Mapping[str, int]) -> None:
        """Bring the run's metrics log back to where it stood when a checkpoint was saved."""
        self._sampled_tokens = None  # a rate across a load would be wrong
        if self.run is not None:
            self.run.rewind(position)
            if self._trackers is not None:
                self._trackers.rewind(position.get("step"))

    @contextmanager
    def paused(self, is_paused: bool = True) -> Generator[None]:
        """Record nothing within the block."""
        run, sink = self.run, self.sink
        if is_paused:
            self.run = self.sink = None
        try:
            yield
        finally:
            self.run, self.sink = run, sink

    # -- the end ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Record nothing any more, and leave the run open: another process writes it."""
        self.run = self.sink = self._trackers = self._root = self._sampler = None
        self.is_wanted = False
        self.phases = PhaseTimes()

    def _stop_sampling(self) -> dict[str, Any]:
        """End the thread; return the time of each phase, and the tokens, for the last event."""
        measured: dict[str, Any] = {}
        if self._sampler is not None:
            self._sampler.stop()
            self._cleanup.detach()
            self.phases.take(self._hook_seconds())
            measured = {"times": self.phases.totals(), "tokens_seen": self._tokens()}
        self._sampler, self.phases = None, PhaseTimes()
        self._tokens, self._hook_seconds = lambda: None, dict
        return measured

    def problem(self) -> str | None:
        """Return what is missing in the run, in one line; None if it is complete."""
        problems = [] if self._trackers is None else self._trackers.describe_problems()
        if self.run is not None and (own := self.run.problem) is not None:
            problems.insert(0, own)
        return "; ".join(problems) or None

    def close(
        self,
        status: str,
        reason: str | None,
        summary: Summary,
        error: BaseException | None,
        step: int,
        epoch: int | None,
    ) -> None:
        """End the run; nothing is recorded afterwards.

        The run is closed before the wait for trackers: a process that is killed meanwhile has
        completed it.
        """
        sink = self.sink
        with HeldInterrupts():
            self.metrics(step, epoch, self._step_means.means())  # logged since the last step
            self._step_means = Means()
            measured = self._stop_sampling()
            if sink is not None:
                sink.flush()
            if self.run is not None:
                if self._trackers is not None:
                    self._trackers.write_ids()
                    if missing := self._trackers.report():
                        self.run.event("trackers", missing=missing)
                end = {"status": status, "reason": reason, "step": step}
                if error is not None:
                    end["error"] = _mask(f"{type(error).__name__}: {error}")
                    end["traceback"] = _format_traceback(error)
                skipped, hooks = self.skipped_steps, summary.as_dict()
                self.run.event("end", **end, **measured, skipped_steps=skipped, hooks=hooks)
                self.run.close(status, error)
            self.run = self.sink = None
        if self._trackers is not None and sink is not None:
            try:
                with AllowedInterrupts():  # it may wait for a server
                    self._trackers.finish(status)
            finally:
                sink.close(status, error)  # of a run without a folder, whose images are needed
                self._trackers.close()


def _hook_seconds(hooks: HookManager, earlier: Mapping[str, float]) -> dict[str, float]:
    """Return the time of all hooks by event, without that of an earlier run."""
    seconds: dict[str, float] = {}
    for info in hooks.summary().hooks:
        for event, cost in info.costs.items():
            seconds[event] = seconds.get(event, 0.0) + cost.seconds
    return {event: max(0.0, own - earlier.get(event, 0.0)) for event, own in seconds.items()}


def _mask(text: str) -> str:
    from hookline.masking import mask_text

    return mask_text(text)


def _format_traceback(error: BaseException) -> str:
    """Return the traceback of an error as text, with secrets masked; of a long one, the end."""
    return _mask("".join(traceback.format_exception(error)))[-_MAX_TRACEBACK:]
