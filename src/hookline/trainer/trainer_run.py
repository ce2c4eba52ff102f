"""The start and the end of a trainer's run, and its checkpoints in between."""

from __future__ import annotations

import copy
import logging
import math
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Never

from hookline.arguments import check_path
from hookline.checkpoint import SaveResult
from hookline.checkpoint.part_writer import SharedSave, SharedSaves
from hookline.dispatch import Summary
from hookline.errors import CheckpointError, HooklineError, TrainingError
from hookline.hook import HookGroup
from hookline.loop.checkpoint_saving import CheckpointSaving, share_saves
from hookline.loop.hook_agreement import HookAgreement
from hookline.loop.loop_monitor import LoopMonitor
from hookline.loop.phase_times import PhaseTimes
from hookline.loop.random_state import seed_everything, set_generator_state
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
from hookline.trainer.rank_checks import check_same_training, require_all_processes
from hookline.trainer.resumed_settings import compare_settings, describe_settings
from hookline.trainer.slurm import requeue_slurm_job
from hookline.trainer.trainer_base import Phase, TrainerBase
from hookline.trainer.trainer_checkpoint import (
    collect_checkpoint,
    decode_states,
    encode_states,
    find_start,
    load_trainer_checkpoint,
)

__all__ = ["Preempted", "TrainerRun"]

log = logging.getLogger("hookline")


class Preempted(BaseException):
    """A signal asked the process to end, and the state was saved."""


class TrainerRun(TrainerBase):
    """A trainer's run: how it starts, saves and ends."""

    _saving: CheckpointSaving | None = None
    _saved: list[SaveResult]  # what the other processes have not been told yet
    _shared_saves: SharedSaves | None = None  # of several processes with sharded tensors
    _prepares_saving = False  # whether memory for checkpoints is allocated after the next step
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

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(self, path: Path | str | None = None) -> Path | None:
        """Save all that a resumed run needs; return the checkpoint's folder once it is durable.

        Within a step or the end of an epoch, the state is saved when that is over, and None is
        returned: `on_checkpoint_save` then has the folder. Of several processes, one is enough to
        ask for it while training runs; before and after, all of them have to call this.
        """
        if path is not None:
            path = Path(check_path("save_checkpoint(path)", path, "a folder")).absolute()
        if self._phase is Phase.IN_STEP or (self._is_ending and not self.strategy.is_main):
            self._requests.checkpoint(path)
            return None
        require_all_processes(self, "trainer.save_checkpoint()", unless=self._is_ending)
        if self._is_ending:
            self.strategy.processes.share([path])  # to the others, which wait in `_end_hooks`
        if self._saving is not None:
            return self._save([path], wait=True)
        if not self.strategy.alone:
            return self._save_between_runs(path)
        saving = self._make_saving()
        (result,) = saving.save([self._folder_for(path)], wait=True)
        saving.close()
        if result.error is not None:
            raise result.error
        return result.path

    def _save(self, paths: Sequence[Path | str | None], *, wait: bool = False) -> Path | None:
        """Save at each of the paths; return the first if it is durable already."""
        assert self._saving is not None
        self._prepares_saving = False
        self._gather_rank_states()
        folders = [self._folder_for(path) for path in paths]
        shared = self._shared_save()
        if not self.strategy.is_main:
            if shared is not None:
                self._saving.save(folders, shared=shared)
            if wait:
                self._share_saved()  # waits until rank 0 has saved
            return None
        results = self._saving.save(folders, wait=wait, shared=shared)
        self._rank_states = None
        if wait and not self.strategy.alone:  # otherwise the next agreement says that it has saved
            self._share_saved()
        return next((r.path for r in results if r.requested == folders[0]), None)

    def _shared_save(self) -> SharedSave | None:
        """Return what the processes share to save sharded tensors; None if rank 0 has them all."""
        if not self.strategy.is_sharded:
            return None
        if self._shared_saves is None:
            self._shared_saves = share_saves(self.strategy.processes)
        return self._shared_saves.next()

    def _save_between_runs(self, path: Path | None) -> Path | None:
        """Save while no run is active, in all of several processes."""
        self._saving, self._saved = self._make_saving(), []
        try:
            return self._save([path], wait=True)
        finally:
            self._saving.close()
            self._saving = None

    def _gather_rank_states(self) -> None:
        """Collect the states of all processes for a checkpoint, which rank 0 writes."""
        if not self.strategy.alone:
            self._step_records.report(self._recorder.sink)
            self._rank_states = self.strategy.processes.gather_on_main(self._rank_state())

    def _requested_paths(self) -> list[Path | str | None]:
        """Return where checkpoints were requested in any process; None for the run's folder."""
        own, self._requests.checkpoints = self._requests.checkpoints, []
        gathered = self.strategy.processes.gather(own)
        return list(dict.fromkeys(path for paths in gathered for path in paths))

    def _folder_for(self, path: Path | str | None) -> Path:
        if path is not None:
            return Path(path)
        if self.run is None:
            raise TrainingError(
                "There is no run folder to save into. Give a path: save_checkpoint('…'), or set "
                "`runs` in the configuration."
            )
        return Path(self.run.checkpoints) / f"step_{self.step:06d}"

    def _make_saving(self) -> CheckpointSaving:
        settings = self.config.checkpoints
        timed = partial(self._phases.span, "checkpoints")
        return CheckpointSaving(settings, self._collect, self._report_save, self.hooks, timed)

    def _collect(self) -> dict[str, Any]:
        return collect_checkpoint(self)

    def _report_save(self, result: SaveResult) -> None:
        """Tell the run and the hooks that a checkpoint is durable, or that it failed."""
        step = result.info["step"]
        if not self.strategy.alone and self.strategy.is_main:
            self._saved.append(result)
        if result.path is None:
            if result.error is not None:
                self._recorder.event(
                    "checkpoint_failed", path=str(result.requested), step=step, error=result.error
                )
            for name in self.hooks:
                failed = getattr(self.hooks.get_hook(name), "checkpoint_failed", None)
                if failed is not None:
                    failed(str(result.requested), result.error)
            return
        tokens = result.info["tokens_seen"]
        self._recorder.event("checkpoint", path=str(result.path), step=step, tokens_seen=tokens)
        if self._dispatchers.on_checkpoint_save is not None:
            context = copy.copy(self._context)  # training may be steps ahead of the checkpoint
            context.step, context.epoch = step, result.info["epoch"]
            context.checkpoint_path = result.path
            phase = self._phase
            if not self.strategy.alone:  # a hook of one process may ask for a checkpoint
                self._phase = Phase.IN_STEP
            self._dispatchers.on_checkpoint_save(context)
            self._phase = phase

    def _share_saved(self) -> None:
        """Report the checkpoints that rank 0 has saved in the other processes, too."""
        saved, self._saved = self._saved, []
        shared: list[SaveResult] = self.strategy.processes.share(saved)
        if self.strategy.is_main:
            return
        if shared and self._saving is not None:
            self._saving.release_parts([result.requested for result in shared])
        for result in shared:
            self._report_save(result)

    def _prepare_saving(self) -> None:
        """Allocate the memory that saving needs, after a step: optimizers have their state then."""
        assert self._saving is not None
        self._prepares_saving = False
        self._gather_rank_states()
        if self.strategy.is_main or self.strategy.is_sharded:
            self._saving.prepare(shards_only=not self.strategy.is_main)
        self._rank_states = None

    # -- signals ----------------------------------------------------------------------------------

    def _leave(self, *, can_save: bool = True) -> Never:
        """Save because of a signal, and raise.

        Args:
            can_save: whether all batches of a step were trained on; otherwise nothing is saved.
        """
        requests = self._requests
        signals = [one for one in self.strategy.processes.gather(requests.signal) if one]
        received = signal.SIGINT if signal.SIGINT in signals else signals[0]
        self._recorder.event("signal", step=self.step, signal=received.name)
        paths = self._requested_paths()
        if not can_save:
            paths = []
            log.warning(
                "%s has also ended the workers of a loader, in the middle of a step with several "
                "batches. Nothing is saved: a resumed run continues from an earlier checkpoint.",
                received.name,
            )
        elif not self.strategy.is_main:
            paths.append(None)
        elif self.run is None:
            log.warning(
                "%s: training ends, and nothing is saved, because there is no run folder (`runs` "
                "is None).",
                received.name,
            )
        elif not any(Path(p).parent == self.run.checkpoints for p in paths if p is not None):
            paths.append(None)
        if paths:
            saved = self._save(paths, wait=True)
            if saved is not None:
                self._progress.say(f"{received.name}: saved {shorten_path(saved)}")
        self._stop_signal = received.name
        if received is signal.SIGINT:
            raise KeyboardInterrupt
        requests.stop(received.name)
        raise Preempted

    def _check_late_signal(self) -> None:
        """Pass on a signal that came when training was ending in any case."""
        received = self._requests.signal
        if received is None or self._stop_signal is not None:
            return
        self._stop_signal = received.name
        if received is signal.SIGINT:
            raise KeyboardInterrupt
        log.warning(
            "%s came when training was ending with the status '%s'. `trainer.stop_signal` has its "
            "name: a script that continues should end soon.",
            received.name,
            self.status,
        )

    def _state_before_validation(self) -> Any:
        """Return the encoded state that hooks may change in a validation.

        None if it cannot be saved: the error is raised when a checkpoint is saved.
        """
        try:
            return encode_states(
                {
                    "hooks": self.hooks.state_dict(),
                    "attributes": self._attribute_states(),
                    "run": self._recorder.position(),  # of the metrics log
                }
            )
        except CheckpointError:
            return None

    def _cancel_validation(self, state: Any, generators: list[tuple[Any, Any]]) -> None:
        """Undo a validation that does not end: it is repeated after resuming.

        Args:
            state: what `_state_before_validation` returned.
            generators: the generators of the validation loaders, with their states before it.
        """
        for generator, generator_state in generators:
            set_generator_state(generator, generator_state)
        for name in self.hooks:
            cancel = getattr(self.hooks.get_hook(name), "cancel_validation", None)
            if cancel is not None:
                cancel()
        self._before_validation = {} if state is None else decode_states(state)

    def _requeue(self) -> None:
        if self.status == "preempted" and self.config.checkpoints.requeue and self.strategy.is_main:
            requeue_slurm_job()

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

    def _finish_saving(self, failed: bool) -> None:
        """Wait for the checkpoint that is being written, and report it."""
        if self._saving is None or not self._saving.busy:
            return
        try:
            self._saving.report(wait=True)
        except HooklineError:
            if not failed:
                raise
            log.exception("The last checkpoint could not be saved.")


def _without_options(summary: Summary) -> Summary:
    """Return the summary as it is sent to other processes: options may be any objects."""
    hooks = [replace(hook, options={}, unmasked_options={}) for hook in summary.hooks]
    return replace(summary, hooks=tuple(hooks))
