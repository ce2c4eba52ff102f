"""Saving the checkpoints of a trainer's run: in the background, reported at step boundaries."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hookline.arguments import show_value
from hookline.checkpoint import CheckpointSaver, SaveResult
from hookline.checkpoint.part_writer import SharedSave, SharedSaves
from hookline.checkpoint.state_tree import Encoder
from hookline.config.trainer_config import CheckpointConfig
from hookline.dispatch import HookManager
from hookline.errors import CheckpointError
from hookline.loop.processes import OneProcess

__all__ = ["CheckpointSaving", "share_saves"]

log = logging.getLogger("hookline")


class CheckpointSaving:
    """Saves checkpoints, and reports those that are durable or failed on the training thread.

    Args:
        settings: the settings of the trainer.
        collect: returns the arguments of `CheckpointSaver.save`: `model`, `state`, `info`, `sync`.
        report: called for every checkpoint that is durable or could not be written.
        hooks: the hooks whose states are saved.
        timed: returns a block, in which the time of saving is measured.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        collect: Callable[[], dict[str, Any]],
        report: Callable[[SaveResult], None],
        hooks: HookManager,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._settings = settings
        self._collect = collect
        self._report = report
        self._hooks = hooks
        self._timed = timed
        self._saver = CheckpointSaver(background=settings.background, when_busy=settings.when_busy)
        self._in_flight = 0
        self._grace = settings.grace_seconds or _elastic_timeout()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint has not been reported yet."""
        return self._in_flight > 0

    def prepare(self, *, shards_only: bool = False) -> None:
        """Allocate the memory for copies of the state, so that the first save does not."""
        collected = self._collect()
        state = self._without_unsupported_states(collected["state"]) or collected["state"]
        self._saver.prepare(model=collected["model"], state=state, shards_only=shards_only)

    def save(
        self,
        folders: Sequence[Path],
        *,
        wait: bool = False,
        shared: SharedSave | None = None,
        **info: Any,
    ) -> list[SaveResult]:
        """Copy the state, and write it to each of the folders; return what can be reported now.

        Args:
            folders: where to save; several share the files.
            wait: until the checkpoint is durable.
            shared: several processes save together, each with this call.
            info: further fields for the manifest's `info`.
        """
        with self._timed():
            return self._save(folders, wait, shared, info)

    def _save(
        self, folders: Sequence[Path], wait: bool, shared: SharedSave | None, info: dict[str, Any]
    ) -> list[SaveResult]:
        collected = self._collect()
        info = {**collected.pop("info"), **info}
        try:
            self._saver.save(folders, info=info, shared=shared, **collected)
        except CheckpointError:
            without = self._without_unsupported_states(collected["state"])
            if without is None:
                raise
            collected["state"] = without
            self._saver.save(folders, info=info, shared=shared, **collected)
        if shared is not None and shared.rank:
            return []  # rank 0 reports
        self._in_flight += len(folders)
        return self.report(wait=wait)

    def _without_unsupported_states(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a state without those of hooks that cannot be saved; None if all of them can.

        It counts as a failure of the hook, as an exception in its `state_dict` does.
        """
        saved: dict[str, Any] = {}

        def encode_state(name: str) -> None:
            Encoder(f"hooks[{show_value(name)}]").encode(dict(state["hooks"][name]))
            saved[name] = state["hooks"][name]

        for name in state["hooks"]:
            self._hooks.guard(name)(encode_state, name)
        return None if len(saved) == len(state["hooks"]) else {**state, "hooks": saved}

    def report(self, *, wait: bool = False) -> list[SaveResult]:
        """Report the checkpoints that are durable, or could not be written.

        Raises:
            CheckpointError: one could not be written, and the settings say that training stops.
        """
        with self._timed():
            return self._report_finished(wait)

    def _report_finished(self, wait: bool) -> list[SaveResult]:
        if wait:
            self._saver.wait()
        results = self._saver.finished()
        self._in_flight -= len(results)
        failure: CheckpointError | None = None
        for result in results:
            if result.error is not None:
                failure = result.error
                log.error("%s%s", result.error, _what_now(self._settings))
            elif result.replaced:
                log.warning(
                    "The checkpoint %s was given up for a newer one, because it was still being "
                    "written (checkpoints.when_busy is 'replace').",
                    result.requested,
                )
            else:
                self._check_duration(result.seconds)
            self._report(result)
        if failure is not None and self._settings.on_failure == "stop":
            raise failure
        return results

    def release_parts(self, folders: Sequence[Path]) -> None:
        """Remove what is left of this rank's parts of checkpoints that rank 0 has reported."""
        self._saver.release_parts([folder.absolute() for folder in folders])
        for result in self._saver.finished():
            if result.error is not None:
                log.error("%s", result.error)

    def close(self) -> None:
        """Wait for what is being written, report it, and free the memory."""
        try:
            self.report(wait=True)
        finally:
            self._saver.close()

    def _check_duration(self, seconds: float) -> None:
        if self._grace is not None and seconds > self._grace:
            log.warning(
                "Saving a checkpoint took %.1f s, but after a signal the process has only %.1f s "
                "(checkpoints.grace_seconds, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT) before it is "
                "killed. A checkpoint at that time would not be complete: save more often, or ask "
                "the scheduler for more time.",
                seconds,
                self._grace,
            )
            self._grace = None  # said once


def share_saves(processes: OneProcess) -> SharedSaves:
    """Return the saves of sharded tensors by these processes. All of them have to call this."""
    return SharedSaves(processes.share(uuid.uuid4().hex[:12]), processes.rank, processes.size)


def _what_now(settings: CheckpointConfig) -> str:
    if settings.on_failure == "stop":
        return ""
    return " Training continues; earlier checkpoints are as they were."


def _elastic_timeout() -> float | None:
    """Return the seconds that torchrun waits between a signal and killing the process."""
    try:
        return float(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    except (KeyError, ValueError):
        return None
