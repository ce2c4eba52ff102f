"""The checkpoints of a bare loop: saved between its steps, in the background."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.checkpoint import SaveResult, find_checkpoint
from hookline.config.trainer_config import CheckpointConfig
from hookline.errors import CheckpointError, LoopError
from hookline.integrations.bare_loop.loaded_checkpoint import LoadedCheckpoint
from hookline.integrations.bare_loop.loop_agreement import meet, trains_together
from hookline.integrations.bare_loop.loop_checks import is_compiled_in_place
from hookline.integrations.bare_loop.session_state import (
    collect_session,
    rank_state,
    read_for_session,
    restore_session,
)
from hookline.integrations.bare_loop.step_boundary import StepBoundary
from hookline.loop.checkpoint_saving import CheckpointSaving
from hookline.loop.event_context import device_of
from hookline.loop.processes import ProcessGroup, is_main_process, share_from_main
from hookline.loop.random_state import random_state
from hookline.runs.jsonable import canonical_json
from hookline.runs.recorder import describe_loop
from hookline.runs.run import Run
from hookline.runs.training_description import describe_training
from hookline.runs.unfinished_runs import comparable_config, find_unfinished_run

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.attached_loop import AttachedLoop

__all__ = ["SessionCheckpoints"]

log = logging.getLogger("hookline")


class SessionCheckpoints:
    """Saves the state of a loop, and restores it.

    What a hook requests in a step is saved between this step and the next, when the loop has
    updated its schedulers and its scaler. The random states are those at the end of the step: what
    is drawn for the next batch is drawn again after resuming.

    Args:
        session: the session.
        settings: how checkpoints are written.
    """

    def __init__(self, session: AttachedLoop, settings: CheckpointConfig) -> None:
        self._session = session
        self._saving = CheckpointSaving(
            settings,
            self._collect,
            self._report,
            session.hooks,
            lambda: session._step_watch.phases.span("checkpoints"),
        )
        self._boundary = StepBoundary(
            session.model, lambda: session._step_watch.model.calls_seen > 0, self.save_requested
        )
        self._requests: list[Path] = []
        self._extra: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None  # at the end of the step; None: not known yet
        self._prepares = False
        self._rank_states: list[Any] | None = None  # of all processes, where all save together
        self._last_states: list[Any] | None = None  # the same, at the end of training
        self._saved: list[SaveResult] = []  # that the other processes do not know of yet

    # -- saving -----------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether something has to be done at the end of steps."""
        return bool(self._requests) or self._prepares or self._saving.busy

    def prepare_after_step(self) -> None:
        """Allocate the memory for the first checkpoint after the next step."""
        self._prepares = is_main_process()

    def save(self, path: Path | None, extra: Mapping[str, Any], *, wait: bool) -> Path | None:
        """Save now; return the folder if it is durable already.

        Rank 0 writes. If all processes call this, the checkpoint has the state of each.
        """
        session = self._session
        rank_states, agreement = self._last_states, session._agreement
        if agreement is not None and not session._ended and agreement.begin_save():
            agreement.records.report(session.run)
            rank_states = self._gather_rank_states()
        if not is_main_process():
            return None
        self.save_requested()
        self._extra, self._rank_states = dict(extra), rank_states
        folder = self._folder_for(path)
        try:
            results = self._saving.save([folder], wait=wait)
        finally:
            self._extra, self._rank_states = {}, None
        return next((result.path for result in results if result.requested == folder), None)

    def request(self, path: Path | None, extra: Mapping[str, Any]) -> None:
        """Save before the next step begins."""
        if not is_main_process():
            return
        self._check_boundary()
        folder = self._folder_for(path)
        if folder not in self._requests:
            self._requests.append(folder)
        self._extra |= extra

    def _check_boundary(self) -> None:
        """Raise if the moment between two steps is not seen."""
        if is_compiled_in_place(self._session._context):
            raise LoopError(
                "This model was compiled in place (model.compile()), so the moment between two "
                "steps is not seen. Use `compiled = torch.compile(model)`, call `compiled` in the "
                "loop and attach it; or call `session.save_checkpoint()` in the loop."
            )

    def event_ended(self, *, in_step: bool) -> None:
        """Wait for the next step, if something was requested and gradients are not in use."""
        if self._requests and not in_step:
            self._random = random_state(device_of(self._session.model))
            self._boundary.watch()

    def step_ended(self) -> None:
        """Report what is durable, and wait for the next step if something was requested."""
        self.event_ended(in_step=False)
        if self._prepares:
            self._prepares = False
            self._saving.prepare(shards_only=not is_main_process())
        if self._saving.busy:
            self._saving.report()

    def save_requested(self) -> None:
        """Save what was requested: the next step begins, or training ends."""
        self._boundary.stop()
        if self._random is not None:
            requests, self._requests = self._requests, []
            self._saving.save(requests)
            self._extra, self._random, self._rank_states = {}, None, None

    def finish(self, *, failed: bool, together: bool) -> None:
        """Save what was requested, wait for what is being written, and report it.

        Args:
            failed: whether the loop ended with an exception.
            together: whether all processes end now, of several that train together.
        """
        self._boundary.stop()
        if not failed:
            self.save_requested()
        elif self._requests:
            log.warning(
                "The checkpoint %s was requested, but not saved: the loop ended early, with an "
                "exception that may have happened within a step.",
                self._requests[0],
            )
        try:
            if self._saving.busy:
                self._saving.report(wait=True)
        except CheckpointError:
            if not failed:
                raise
            log.exception("The last checkpoint could not be saved.")

    @contextmanager
    def ending(self) -> Generator[None]:
        """Fire `on_train_end` in the block, in all processes that train together."""
        self._last_states = self._gather_rank_states()
        yield
        self._last_states = None

    # -- several processes ------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether the other processes have to know something."""
        return bool(self._saved or self._requests)

    def exchange_news(self) -> None:
        """Exchange it. All processes have to call this."""
        self.exchange_saved()
        assert self._session._agreement is not None
        self._session._agreement.records.report(self._session.run)  # before it is saved
        if self._processes.share(bool(self._requests)):
            self._rank_states = self._gather_rank_states()

    def _gather_rank_states(self) -> list[Any] | None:
        """Return the state of each process in rank 0. All processes have to call this."""
        session = self._session
        random = self._random or random_state(device_of(session.model))
        return self._processes.gather_on_main(rank_state(session, random))

    def exchange_saved(self) -> None:
        """Tell hooks of all processes what rank 0 has saved. All processes have to call this."""
        saved, self._saved = self._saved, []
        shared: list[SaveResult] = self._processes.share(saved)
        if not self._processes.is_main:
            self._saving.release_parts([result.requested for result in shared])
            for result in shared:
                self._report(result)

    @property
    def _processes(self) -> ProcessGroup:
        """The processes that train together."""
        assert self._session._agreement is not None
        return self._session._agreement.processes

    def close(self) -> None:
        """Free the memory."""
        self._boundary.detach()
        self._saving.close()

    def _folder_for(self, path: Path | None) -> Path:
        session = self._session
        if path is not None:
            return Path(path)
        if session.run is None:
            raise LoopError(
                "There is no run folder to save into. Give a path: `save_checkpoint('…')`, or a "
                "folder for runs: `attach(…, runs='runs')`."
            )
        return Path(session.run.checkpoints) / f"step_{session.step:06d}"

    def _collect(self) -> dict[str, Any]:
        session = self._session
        random = self._random or random_state(device_of(session.model))
        return collect_session(session, random, self._extra, self._rank_states)

    def _report(self, result: SaveResult) -> None:
        """Tell the run and the hooks that a checkpoint is durable, or that it failed."""
        session = self._session
        if session._agreement is not None and is_main_process():
            self._saved.append(result)
        record = session._recorder.event if session._recorder is not None else _record_nothing
        step = result.info["step"]
        if result.path is None:
            if result.error is not None:
                path, error = str(result.requested), result.error
                record("checkpoint_failed", path=path, step=step, error=error)
            for name in session.hooks:
                failed = getattr(session.hooks.get_hook(name), "checkpoint_failed", None)
                if failed is not None:
                    failed(str(result.requested), result.error)
            return
        tokens = result.info["tokens_seen"]
        record("checkpoint", path=str(result.path), step=step, tokens_seen=tokens)
        session._supplied.add("checkpoint")
        dispatch = session.hooks.dispatchers.on_checkpoint_save
        if dispatch is not None:
            context = copy.copy(session._context)  # training may be steps ahead of the checkpoint
            context.step, context.known_epoch = step, result.info["epoch"]
            context.checkpoint_path = result.path
            dispatch(context)

    # -- loading ----------------------------------------------------------------------------------

    def load(self, path: str | os.PathLike[str], *, strict: bool) -> LoadedCheckpoint | None:
        """Restore the loop's objects from a checkpoint; None if there is none to continue."""
        if trains_together(self._session.model, self._session.optimizers):
            meet("load_checkpoint")
        found = self._find(os.fspath(path))
        if found is None:
            return None
        session = self._session
        if (
            session.training_description is None
        ):  # as it started; the learning rate may have changed
            session.training_description = describe_training(session)
        checkpoint = read_for_session(session, found, strict=strict)
        loaded = restore_session(session, checkpoint)
        session._supplied.add("resumed")
        session._restored = found, checkpoint.state
        if session.started:  # else the run is continued when training starts
            if session.run is not None and checkpoint.info.get("run_id") == session.run.id:
                session._rewind(loaded.step)
            session._fire_load()
        return loaded

    def _find(self, given: str) -> Path | None:
        if given != "auto":
            if "://" in given:
                from hookline.checkpoint.remote import fetch_checkpoint

                into = Path(str(self._session._runs or "runs")) / "fetched"
                return Path(fetch_checkpoint(given, into))
            return find_checkpoint(Path(given), verify=True)
        if self._session.started:
            raise LoopError(
                "load_checkpoint('auto') continues a run, but training has started in a new one. "
                "Load before that: `session = attach(…)`, `session.load_checkpoint()`, and then "
                "`with session:`."
            )
        found = self._find_run() if is_main_process() else None
        decided: Path | None = share_from_main(found)
        return decided

    def _find_run(self) -> Path | None:
        session, runs = self._session, self._session._runs
        if runs is None:
            return None
        if isinstance(runs, Run):
            try:
                return find_checkpoint(runs.path, verify=True)
            except CheckpointError:
                return None
        config = session._recorded_config()
        here = describe_loop(config, session.hooks.describe(), session)

        def is_same(there: Mapping[str, Any]) -> bool:
            return (
                comparable_config(there.get("config") or {}) == comparable_config(config)
                and there.get("name") == session.name
                and all(
                    canonical_json(there.get(part)) == canonical_json(here[part])
                    for part in ("hooks", "training")
                )
            )

        found, message = find_unfinished_run(Path(str(runs)), is_same)
        session._announce(message)
        return found


def _record_nothing(kind: str, **fields: Any) -> None:
    """There is no run."""
