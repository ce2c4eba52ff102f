"""The start and the end of a trainer's run."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hookline.dispatch import Summary
from hookline.errors import HooklineError
from hookline.hook import HookGroup
from hookline.loop.hook_agreement import HookAgreement
from hookline.loop.loop_monitor import LoopMonitor
from hookline.loop.phase_times import PhaseTimes
from hookline.loop.random_state import seed_everything
from hookline.loop.step_records import StepRecords
from hookline.loop.weight_sharing import share_buffers
from hookline.runs.recorder import Recorder
from hookline.runs.run_elsewhere import RunElsewhere
from hookline.runs.run_lookup import find_run_of_checkpoint, shorten_path
from hookline.trainer.checks import needs_metric
from hookline.trainer.data_position import DataPosition
from hookline.trainer.forking import load_fork
from hookline.trainer.losses import LossCheck
from hookline.trainer.progress import make_progress
from hookline.trainer.rank_checks import check_same_training
from hookline.trainer.resumed_settings import compare_settings, describe_settings
from hookline.trainer.trainer_base import Phase
from hookline.trainer.trainer_checkpoint import (
    find_start,
    load_trainer_checkpoint,
)
from hookline.trainer.trainer_validation import TrainerValidation

__all__ = ["TrainerRun"]

log = logging.getLogger("hookline")


class TrainerRun(TrainerValidation):
    """A trainer's run: how it starts and ends."""

    _rank_watch: Any = None

    def _begin(self, resume_from: Any, fork_from: Any = None, *, strict: bool = True) -> None:
        config, context = self.config, self._context
        self._phase = Phase.STARTING
        self._read_config()
        context.status = "training"
        context.exception = None
        context.evaluating = False
        context.step, context.step_in_progress = 0, 1
        context.counted_tokens, context.tokens_unknown = 0, False
        self._position = DataPosition(fast_forward=config.fast_forward)
        self._position.val_loaders = () if self.val_data is None else self.val_data.loaders
        self._run_position = self._stop_signal = None
        self._saved = []
        self._epoch_started = self._epoch_over = self._validation_due = False
        self._last_epoch = 0
        self._sanity_due = config.sanity
        self._optimizer_round = 0
        self._accumulated_losses.clear()
        self._accumulated_metrics.clear()
        if config.seed is not None:
            seed_everything(config.seed + self.strategy.processes.rank)
        if not self.model.training:  # the modes of modules in a training model are the user's
            self.model.train()
        self._progress = make_progress(config.progress if self.strategy.is_main else "off")
        self._recorder = Recorder(config.runs, self._trackers)
        self._settings = describe_settings(self)
        if not self.strategy.alone:
            check_same_training(self)
        restored, parent = self._restore(resume_from, fork_from, strict)
        if self._seeds_samples:
            self._position.per_sample_seed = config.seed or 0
        started = self.strategy.processes.call_on_main(lambda: self._start_run(restored, parent))
        run = self._recorder.run
        self._context.run = RunElsewhere(*started) if started and run is None else run
        self._phases = PhaseTimes()
        if run is not None:
            self._monitor = LoopMonitor(run, self.device, self.hooks, lambda: self.known_tokens)
            self._phases = self._monitor.phases
        self._watch_ranks()
        self._called_model = self.strategy.wrap(self.model)
        self._step_records = StepRecords(self.strategy.processes)
        self._hook_agreement = HookAgreement(self.hooks, self.strategy.processes)
        self._hooks_toggled = False
        context.agree_on_norm(self.hooks, self.strategy.processes)
        self._saving = self._make_saving()
        self._prepares_saving = any(
            getattr(self.hooks.get_hook(name), "hookline_group", None) is HookGroup.CHECKPOINT
            for name in self.hooks
        )
        self._progress.start(
            epochs=self.max_epochs, steps=config.max_steps, first_step=context.step
        )
        if self._recorder.run is not None:
            self.run.call_when_lease_is_lost(self._requests.wake)
            self._progress.say(f"run {shorten_path(self.run.path)}")
        self._phase = Phase.BETWEEN_STEPS
        self._watch_model()
        self._sync_probes()
        self.hooks.run_started()
        if not self.strategy.alone:  # hooks of one process may ask for a checkpoint
            self._phase = Phase.IN_STEP
        if self._dispatchers.on_train_start is not None:
            self._dispatchers.on_train_start(context)
        if restored is not None and self._dispatchers.on_checkpoint_load is not None:
            context.checkpoint_path = restored
            self._dispatchers.on_checkpoint_load(context)
        self._phase = Phase.BETWEEN_STEPS

    def _watch_ranks(self) -> None:
        """Name the processes that make the others wait, in rank 0 and as events of the run."""
        after, processes = self.config.slow_rank_seconds, self.strategy.processes
        if self.strategy.alone or after is None:
            return
        from hookline.loop.rank_watch import STAGES, RankWatch  # its import takes a while

        def place() -> tuple[int, int, int]:
            position = self._position
            stage = len(STAGES) - 1 if processes.is_waiting else processes.stage
            return position.epoch, position.batches, stage

        self._rank_watch = RankWatch(processes, after, place, self._recorder.event)

    def _restore(self, resume_from: Any, fork_from: Any, strict: bool) -> tuple[Path | None, Any]:
        """Load a checkpoint; return its folder, and the parent of a run that is forked."""
        if fork_from is not None:
            return load_fork(self, fork_from)
        start: Path | None = None
        if resume_from is not None:
            start = self.strategy.processes.call_on_main(lambda: find_start(self, resume_from))
        if start is not None:
            saved = load_trainer_checkpoint(self, start, strict=strict)
            self._settings, message = compare_settings(saved.get("settings", {}), self._settings)
            if message is not None:
                log.warning("%s: %s", shorten_path(start), message)
            self._check_end(start)
        return start, None

    def _check_end(self, checkpoint: Path) -> None:
        """Warn if training has gone further than these settings say."""
        config, position, epochs = self.config, self._position, self.max_epochs
        ends = []
        if epochs is not None and (position.epoch, position.batches) > (epochs, 0):
            ends.append(f"max_epochs is {epochs}")
        if config.max_steps is not None and self.step > config.max_steps:
            ends.append(f"max_steps is {config.max_steps}")
        if ends:
            log.warning(
                "Nothing is left to train: the checkpoint %s was saved after step %d and %d "
                "epochs, and %s.",
                *(checkpoint, self.step, position.epoch, " and ".join(ends)),
            )

    def _start_run(self, restored: Path | None, parent: Any) -> tuple[str, Path] | None:
        """Start a run, or continue the folder of a resumed one; return its id and folder."""
        config = self.config
        resumed = restored is not None and parent is None and config.runs is not None
        folder = find_run_of_checkpoint(restored) if restored and resumed else None
        if resumed and folder is None:
            self.announce(
                f"The checkpoint {restored} is not in the folder of its run: a new run is "
                f"written, whose records begin after step {self.step}."
            )
        self._recorder.begin(
            config=config.model_dump(mode="json"),
            seed=config.seed,
            hooks=self.hooks.describe(),
            device=self.device,
            step=self.step,
            resumed_run=folder,
            restored=restored,
            position=self._run_position,
            parent=parent,
            loop=self,
            config_is_complete=hasattr(config, "training"),  # that of a config file
        )
        run = self._recorder.run
        return None if run is None else (run.id, run.path.absolute())

    def _read_config(self) -> None:
        """Read what every batch needs, once per run: attributes of the configuration are slow."""
        config = self.config
        self._optimizer_every = config.optimizer_every or [1] * len(self.optimizers)
        self._has_optimizer_schedule = any(every > 1 for every in self._optimizer_every)
        self._due_optimizers = list(enumerate(self.optimizers))  # those that step in this step
        self._step_schedulers: list[list[Any]] = []  # by optimizer; they step after it
        if self.schedulers and config.scheduler_every == "step":
            self._step_schedulers = [
                [
                    self.strategy.stepped_scheduler(scheduler)
                    for scheduler in self.schedulers
                    if scheduler.optimizer is optimizer and not needs_metric(scheduler)
                ]
                for optimizer in self.optimizers
            ]
        self._autocasts = config.precision != "fp32"
        self._clips = config.clip_norm is not None or config.clip_value is not None
        self._accumulate = config.accumulate
        self._reads_at_once = self.device.type == "cpu"  # there is no device to wait for
        self._loss_check = LossCheck(config.on_nan, deferred=not self._reads_at_once)
        self._validate_every = config.validate_every_steps
        self._limit = math.inf if config.max_steps is None else config.max_steps
        self._multi_loader = self.train_data is not None and len(self.train_data.names) > 1

    # -- the end ----------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        context = self._context
        context.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        context.exception = error
        if not self.strategy.alone:
            self.strategy.processes.report_error(error)
        has_started = self._phase not in (Phase.IDLE, Phase.STARTING)
        if has_started and self._dispatchers.on_exception is not None:
            try:
                self._dispatchers.on_exception(context)
            except HooklineError:  # the first error matters more, and is raised
                log.exception("A hook failed in on_exception.")
        if has_started and isinstance(error, Exception) and self.config.checkpoints.on_crash:
            self._save_after_crash()

    def _save_after_crash(self) -> None:
        if self._saving is None or self.run is None:
            return
        folder = Path(self.run.checkpoints) / f"crash_{self.step:06d}"
        if self.strategy.is_sharded and not self.strategy.alone:
            log.warning(
                "The state after the exception is not saved (checkpoints.on_crash): this process "
                "has a part of the model, and the others may not be there any more.",
                extra={"own_rank": True},
            )
            return
        if not self.strategy.alone:
            folder = folder.with_name(f"{folder.name}_rank{self.strategy.processes.rank}")
        try:
            self._saving.save([folder], wait=True, emergency=True)
        except Exception:  # the error that ended training matters more
            log.exception("The state after the exception could not be saved.")

    def _end(self) -> None:
        context, phase = self._context, self._phase
        if phase is Phase.IDLE:
            return
        failed = context.status in ("error", "interrupted")
        if not failed and not self.strategy.alone and phase is not Phase.STARTING:
            self._step_records.report(self._recorder.sink)
            (stopped,) = self.strategy.any_rank(self._requests.stop_reason is not None)
            if stopped:
                self.stop("another process asked for it")  # the first reason is kept
        if context.status == "training":
            context.status = "completed" if self._requests.stop_reason is None else "stopped"
        if self._requests.checkpoints:
            log.warning(
                "A checkpoint that was asked for at step %d was not saved, because training ended "
                "in the middle of a step. To save the state after an exception, set "
                "checkpoints.on_crash in the TrainerConfig.",
                self.step,
            )
        try:
            self._finish_saving(failed)
            if not failed and not self.strategy.alone and phase is not Phase.STARTING:
                self._share_saved()
                share_buffers(self.model)
            self._phase = Phase.IDLE
            self._watch_model()
            if phase is not Phase.STARTING:
                self._end_hooks(agrees=not failed and not self.strategy.alone)
        except BaseException as error:
            if not failed or not isinstance(error, HooklineError):
                interrupted = isinstance(error, KeyboardInterrupt)
                context.status = "interrupted" if interrupted else "error"
                context.exception = error
                raise
            log.exception("A hook failed in on_train_end.")
        finally:
            self._phase = Phase.IDLE
            self._before_validation = {}
            if self._saving is not None:
                self._saving.close()
                self._saving = None
            self.strategy.unwrap()
            self._called_model = self.model
            self._watch_model()
            self._sync_probes()
            self.hooks.run_ended()
            summary = self._summary_of_all()
            if self._rank_watch is not None:
                self._rank_watch.close()
                self._rank_watch = None
            reasons = [text for text in (self.stop_reason, self._recorder.problem()) if text]
            self._progress.end(context.status, summary, "; ".join(reasons))
            measured = {} if self._monitor is None else self._monitor.close()
            self._monitor, self._phases = None, PhaseTimes()
            reason, step = self._requests.stop_reason, self.step
            self._recorder.close(
                context.status, reason, summary, context.exception, step, **measured
            )

    def _write_report(self) -> None:
        """Write the run's report, unless a signal asks this process to end soon."""
        if self.strategy.is_main and self.run is not None and self._stop_signal is None:
            from hookline.report.at_end import write_report_at_end

            made = write_report_at_end(self.run, self.status, wanted=self.config.report)
            if made is not None:
                self._progress.say(f"report {shorten_path(made)}")

    def _summary_of_all(self) -> Summary:
        """Return the summary of the hooks; after an error, that of this process only."""
        summary = self.hooks.summary()
        if self.strategy.alone or self._context.status in ("error", "interrupted"):
            return summary
        gathered = self.strategy.processes.gather_on_main(_without_options(summary))
        return replace(summary, other_ranks=tuple(gathered[1:])) if gathered else summary

    def _end_hooks(self, *, agrees: bool) -> None:
        """Fire on_train_end; of several processes that `agree`, all save what a hook of one saves.

        A hook in rank 0 saves at once, and the other processes wait for that after their own hooks.
        """
        processes, fire = self.strategy.processes, self._dispatchers.on_train_end
        self._is_ending = agrees
        try:
            if fire is not None:
                fire(self._context)
            if not agrees:
                return
            if self.strategy.is_main:
                processes.share([])
            while not self.strategy.is_main and (paths := processes.share(None)):
                self._save(paths, wait=True)
                asked = self._requests.checkpoints
                self._requests.checkpoints = [path for path in asked if path not in paths]
            save, toggled = processes.any(bool(self._requests.checkpoints), self._hooks_toggled)
            if save:
                self._save(self._requested_paths(), wait=True)
            if toggled:
                self._hook_agreement.apply_toggles()
        finally:
            self._is_ending = False


def _without_options(summary: Summary) -> Summary:
    """Return the summary as it is sent to other processes: options may be any objects."""
    hooks = [replace(hook, options={}, unmasked_options={}) for hook in summary.hooks]
    return replace(summary, hooks=tuple(hooks))
