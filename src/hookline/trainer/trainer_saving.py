"""The checkpoints that a trainer saves while it trains: when asked to, and at a signal."""

from __future__ import annotations

import copy
import logging
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Never

from hookline.arguments import check_path
from hookline.checkpoint import SaveResult
from hookline.checkpoint.part_writer import SharedSave, SharedSaves
from hookline.errors import HooklineError, TrainingError
from hookline.loop.checkpoint_saving import CheckpointSaving, share_saves
from hookline.runs.run_lookup import shorten_path
from hookline.trainer.rank_checks import require_all_processes
from hookline.trainer.slurm import requeue_slurm_job
from hookline.trainer.trainer_base import Phase
from hookline.trainer.trainer_checkpoint import collect_checkpoint
from hookline.trainer.trainer_state import TrainerState

__all__ = ["Preempted", "TrainerSaving"]

log = logging.getLogger("hookline")


class Preempted(BaseException):
    """A signal asked the process to end, and the state was saved."""


class TrainerSaving(TrainerState):
    """A trainer that saves checkpoints."""

    _saving: CheckpointSaving | None = None
    _saved: list[SaveResult]  # what the other processes have not been told yet
    _shared_saves: SharedSaves | None = None  # of several processes with sharded tensors
    _prepares_saving = False  # whether memory for checkpoints is allocated after the next step

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

    def _requeue(self) -> None:
        if self.status == "preempted" and self.config.checkpoints.requeue and self.strategy.is_main:
            requeue_slurm_job()
