"""The run of a session: where it is written, how it is continued, and what is said about it."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.context import LazyFloat
from hookline.dispatch import HookManager
from hookline.files.plain_names import is_plain_name
from hookline.integrations.bare_loop.bare_loop_context import BareLoopEventContext
from hookline.integrations.bare_loop.loop_agreement import LoopAgreement
from hookline.integrations.bare_loop.stop_request import StopRequest
from hookline.loop.event_context import device_of
from hookline.loop.phase_times import PhaseTimes
from hookline.loop.processes import is_main_process
from hookline.loop.training_loop import TrainingLoop
from hookline.printable import printable_message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookline.integrations.bare_loop.recorded_session import SessionRecorder
    from hookline.integrations.bare_loop.step_watch import StepWatch
    from hookline.loop.loop_monitor import LoopMonitor
    from hookline.runs.run import Run

__all__ = ["RecordedLoop"]

log = logging.getLogger("hookline")


class RecordedLoop(TrainingLoop[HookManager]):
    """A loop whose steps, epochs and validations are recorded in a run, if it has one."""

    _context: BareLoopEventContext
    run: Run | None
    _runs: Any
    _trackers: Any  # a `TrackerSet`, or None
    _wants_report: bool
    _recorder: SessionRecorder | None
    _monitor: LoopMonitor | None = None
    _step_watch: StepWatch
    _restored: tuple[Path, Mapping[str, Any]] | None  # the checkpoint, and its state
    _agreement: LoopAgreement | None
    _stop: StopRequest

    @property
    def _is_recorded(self) -> bool:
        """Whether values are logged to a run or to trackers."""
        return self._runs is not None or self._trackers is not None

    @property
    def _sink(self) -> Run | None:
        """What values are logged to: the run, or one that is for trackers only."""
        return None if self._recorder is None else self._recorder.sink

    def _start_recorder(self) -> None:
        if not self._is_recorded:
            return
        from hookline.integrations.bare_loop.recorded_session import SessionRecorder

        recorder = SessionRecorder(self._runs, self._trackers)
        recorder.start(self, self._recorded_config())
        if recorder.sink is not None:
            self._recorder, self.run = recorder, recorder.run
        if recorder.run is not None:
            self._start_monitor(recorder.run)
            from hookline.runs.run_lookup import shorten_path  # most sessions write no run

            self._announce(f"run {shorten_path(recorder.run.path)}")

    def _start_monitor(self, run: Run) -> None:
        from hookline.loop.loop_monitor import LoopMonitor

        context, device = self._context, device_of(self.model)
        self._monitor = LoopMonitor(run, device, self.hooks, lambda: context.known_tokens)
        self._step_watch.phases = self._monitor.phases

    def _recorded_config(self) -> dict[str, Any]:
        """Return the configuration for the run's manifest."""
        from hookline.runs.jsonable import to_jsonable

        given = to_jsonable(self._context.known_config)
        return given if isinstance(given, dict) else {} if given is None else {"config": given}

    def _find_resumed_run(self, restored: Path) -> Path | None:
        """Return the folder of the run that the checkpoint belongs to."""
        from hookline.runs.run_lookup import find_run_of_checkpoint

        run_id = (self._restored or (None, {}))[1].get("run_id")
        if isinstance(self._runs, str) and is_plain_name(run_id):
            folder = Path(self._runs) / run_id
            return folder if (folder / "manifest.json").is_file() else None
        return find_run_of_checkpoint(restored)

    def _rewind(self, step: int) -> None:
        """Continue the record behind the checkpoint that was loaded."""
        position = None if self._restored is None else self._restored[1].get("run")
        if self._recorder is not None:
            self._recorder.rewind(position or {"step": step})
            self._recorder.add_unreported(self._restored)

    def _record_step(self, loss: LazyFloat | None) -> None:
        step, epoch = self._context.step, self._context.known_epoch
        agreement = self._agreement
        if self._recorder is not None:
            self._recorder.end_step(step, epoch, loss, keep_loss=agreement is None)
        if agreement is not None:  # the means over all processes, later
            agreement.keep_step(loss)
        monitor = self._monitor
        if monitor is not None:
            if monitor.sampler.sample is not None:
                monitor.record(step, epoch)
            monitor.phases.end_batch()

    def _record_skip(self, reason: str, optimizer_idx: int) -> None:
        if self._recorder is not None:
            self._recorder.step_skipped(self._context.step, reason, optimizer_idx)

    def _record_stop(self, reason: str) -> None:
        """Record a request to stop; of several, the first."""
        if self._recorder is not None and self._stop.reason is None:
            self._recorder.stop_requested(self._context.step, reason)

    def _close_recorder(self, status: str, error: BaseException | None) -> None:
        if self._recorder is not None:
            step = self._context.step
            self._recorder.end_step(step, self._context.known_epoch, None)
            measured = {} if self._monitor is None else self._monitor.close()
            self._monitor, self._step_watch.phases = None, PhaseTimes()
            summary, reason = self.hooks.summary(), self._stop.reason
            self._recorder.close(status, reason, summary, error, step, **measured)
            self._recorder = None
            if self.run is not None:
                from hookline.report.at_end import write_report_at_end

                made = write_report_at_end(self.run, status, wanted=self._wants_report)
                if made is not None:
                    self._announce(f"report {made}")

    def _announce(self, text: str) -> None:
        """Tell users something: in the log if it is configured, else on the terminal."""
        if not is_main_process():
            return
        if log.isEnabledFor(logging.INFO) and log.hasHandlers():
            log.info("%s", text)
        else:
            with suppress(OSError, ValueError, AttributeError):  # there may be no terminal
                print(printable_message(text), file=sys.stderr, flush=True)
