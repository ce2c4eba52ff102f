"""The checkpoints of a loop: saved at step boundaries, written in the background, then reported.

    request or save   in a hook or the loop, in any rank
    agree             between two steps, in all ranks: who has requested or saved something
    save_requested    when the state is complete: it is copied, and written while training goes on
    report            at a later boundary: what is durable is told to the run and the hooks

Of several ranks, rank 0 writes; a sharded model is written by all of them, each its shards.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.arguments import show_value
from hookline.checkpoint import CheckpointSaver, SaveResult
from hookline.checkpoint.saver import SharedSave, SharedSaves
from hookline.checkpoint.snapshot import Encoder
from hookline.config.trainer_config import CheckpointConfig
from hookline.context import numbers_in
from hookline.dispatch import HookManager
from hookline.errors import CheckpointError, HooklineError
from hookline.hook import HookGroup
from hookline.loop.control_requests import (
    ControlRequests,
    SaveRequest,
    elastic_timeout,
    split_requests,
)
from hookline.loop.event_context import EventContext
from hookline.loop.loop import report_checkpoint
from hookline.loop.rank_sync import RankSync
from hookline.loop.record import Record
from hookline.loop.state import LoopState

log = logging.getLogger("hookline")


@dataclass(eq=False)
class Checkpoints:
    """Saves the state of a loop, and tells the run and the hooks what is durable.

    Attributes:
        no_folder: the error for a checkpoint that has no folder, and no run to put it into.
        is_sharded: whether each rank has a shard of each parameter.
        extra: the values of the user's own that the next save has.
        prepares: whether memory is allocated after the next step.
        is_announcing: whether hooks are being told of a checkpoint.
        is_serving_end: whether all ranks call their hooks for `on_train_end`.
    """

    settings: CheckpointConfig
    context: EventContext
    hooks: HookManager
    requests: ControlRequests
    record: Record
    ranks: RankSync
    state: LoopState
    no_folder: HooklineError
    is_sharded: bool

    def __post_init__(self) -> None:
        settings, hooks = self.settings, self.hooks
        self.extra: dict[str, Any] = {}
        self.is_announcing = self.is_serving_end = False
        self.prepares = any(
            getattr(hooks.get_hook(name), "hookline_group", None) is HookGroup.CHECKPOINT
            for name in hooks
        )
        self._saver = CheckpointSaver(background=settings.background)
        self._shared_saves: SharedSaves | None = None
        self._in_flight = 0
        self._unsent: list[SaveResult] = []  # that the other ranks do not know of yet
        self._rank_states: list[Any] | None = None  # of all ranks, for the next save
        self._grace = settings.grace_seconds or elastic_timeout()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint has not been reported yet."""
        return self._in_flight > 0

    @property
    def has_unsent(self) -> bool:
        """Whether the other ranks do not know yet what was saved."""
        return bool(self._unsent)

    # -- saving -----------------------------------------------------------------------------------

    def save(
        self, requests: Sequence[SaveRequest], *, wait: bool = False, together: bool = True
    ) -> Path | None:
        """Copy the state now, and write it for each request.

        Args:
            requests: what to save, with folders; those for weights only are written apart.
            wait: until the checkpoints are durable.
            together: whether all ranks call this; otherwise rank 0 saves its own state.

        Returns:
            The last save's first folder, if it is durable already.
        """
        is_main = self.ranks.processes.is_main
        self.prepares = False
        if together:
            self.gather_states()
        saved: Path | None = None
        try:
            for kind in split_requests(requests):
                folders = [Path(str(one.path)) for one in kind]
                shared = self._begin_sharded_save() if together else None
                if is_main or shared is not None:
                    info = {"weights_only": True} if kind[0].weights_only else {}
                    self._write(folders, shared, info)
                if is_main:
                    results = self.report(wait=wait)
                    saved = next((r.path for r in results if r.requested == folders[0]), None)
        finally:
            self.extra, self._rank_states = {}, None
        if wait and together:  # otherwise the ranks hear of it when they agree
            self.broadcast_saved()
        return saved

    def save_while_ending(
        self, request: SaveRequest, extra: Mapping[str, Any] | None = None
    ) -> Path | None:
        """Save what a hook asks for in `on_train_end`; see `serve_end`."""
        if not self.ranks.processes.is_main:
            self.requests.checkpoint(request)
            return None
        self.extra = dict(extra or {})
        (request,) = self.with_folders([request], in_all_ranks=False)
        self.ranks.processes.broadcast([request])  # to the others, which wait for it
        return self.save([request], wait=True)

    def save_after_crash(self, folder: Path) -> None:
        """Save the state after an exception, in this rank alone."""
        self._write([folder], None, {"emergency": True})
        self.report(wait=True)

    def gather_states(self) -> None:
        """Collect the states of all ranks for the next save. All of them have to call this."""
        if self.ranks.is_distributed:
            self.ranks.records.report(self.record.sink)  # before it is saved
            own = self.state.collect_own()
            self._rank_states = self.ranks.processes.gather_on_main(own)

    def _begin_sharded_save(self) -> SharedSave | None:
        """Return the save that all ranks take part in; None if rank 0 has all tensors."""
        if not self.is_sharded or not self.ranks.is_distributed:
            return None
        if self._shared_saves is None:
            processes = self.ranks.processes
            key = processes.broadcast(uuid.uuid4().hex[:12])
            self._shared_saves = SharedSaves(key, processes.rank, processes.size)
        return self._shared_saves.next()

    def _write(
        self, folders: Sequence[Path], shared: SharedSave | None, info: Mapping[str, Any]
    ) -> None:
        with self.record.phases.span("checkpoints"):
            collected = self._collect(info)
            if "weights_only" in info:
                collected["state"] = self._state_beside_weights(collected["state"])
            try:
                self._saver.save(folders, shared=shared, **collected)
            except CheckpointError:
                without = self._without_unsupported_states(collected["state"])
                if without is None:
                    raise
                collected["state"] = without
                self._saver.save(folders, shared=shared, **collected)
            if shared is None or not shared.rank:  # rank 0 reports
                self._in_flight += len(folders)

    def _collect(self, further: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `CheckpointSaver.save`."""
        context, run, state = self.context, self.record.run, self.state.collect()
        if self._rank_states is not None:
            state["ranks"] = self._rank_states
        info = {
            "step": context.step,
            "epoch": context.known("epoch"),
            "tokens_seen": context.known("tokens_seen"),
            "run_id": getattr(context.known("run"), "id", None) if run is None else run.id,
            "metrics": numbers_in(context.validated),
            **further,
        }
        sync = [] if run is None else [run.metrics_file]
        weights = self.state.model.state_dict()
        return {"model": weights, "state": state, "info": info, "sync": sync}

    def prepare(self) -> None:
        """Allocate the memory for copies of the state, so that the first save does not.

        After a step: optimizers have their state then.
        """
        self.prepares = False
        is_main = self.ranks.processes.is_main
        if is_main or self.is_sharded:
            with self.record.phases.span("checkpoints"):
                collected = self._collect({})
                saving = self._saving_hooks().values()
                if saving and all(getattr(hook, "saves_weights_only", False) for hook in saving):
                    collected["state"] = self._state_beside_weights(collected["state"])
                state = self._without_unsupported_states(collected["state"]) or collected["state"]
                model, shards_only = collected["model"], not is_main
                self._saver.prepare(model=model, state=state, shards_only=shards_only)

    def _saving_hooks(self) -> dict[str, Any]:
        """Return the hooks that save checkpoints."""
        hooks = self.hooks.of_kind("loop")
        return {name: hook for name, hook, _ in hooks if hasattr(hook, "checkpoint_saved")}

    def _state_beside_weights(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a checkpoint with weights only: hooks recognize theirs by it."""
        saving = self._saving_hooks()
        return {"hooks": {name: one for name, one in state["hooks"].items() if name in saving}}

    def _without_unsupported_states(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a state without those of hooks that cannot be saved; None if all of them can.

        It counts as a failure of the hook, as an exception in its `state_dict` does.
        """
        saved: dict[str, Any] = {}

        def encode_state(name: str) -> None:
            Encoder(f"hooks[{show_value(name)}]").encode(dict(state["hooks"][name]))
            saved[name] = state["hooks"][name]

        for name in state["hooks"]:
            self.hooks.guard(name)(encode_state, name)
        return None if len(saved) == len(state["hooks"]) else {**state, "hooks": saved}

    # -- requests ---------------------------------------------------------------------------------

    def gather_requests(self) -> list[SaveRequest]:
        """Return and forget what was requested in any rank, all of which have to call this."""
        own, self.requests.checkpoints = self.requests.checkpoints, []
        if not self.ranks.is_distributed:
            return own
        gathered = self.ranks.processes.gather((own, self.extra))
        for _, extra in reversed(gathered):  # rank 0's count most
            self.extra |= extra
        return list(dict.fromkeys(one for requests, _ in gathered for one in requests))

    def with_folders(
        self, requests: Sequence[SaveRequest], *, in_all_ranks: bool = True
    ) -> list[SaveRequest]:
        """Return requests with the folders of their checkpoints, which rank 0 knows."""

        def fill() -> list[SaveRequest]:
            return [
                one if one.path is not None else one._replace(path=self._default_folder())
                for one in requests
            ]

        return self.ranks.processes.call_on_main(fill) if in_all_ranks else fill()

    def check_folder(self) -> None:
        """Raise if there is no run whose folder a checkpoint can be saved into."""
        if self.context.known("run") is None and self.ranks.processes.is_main:
            raise self.no_folder

    def _default_folder(self) -> Path:
        self.check_folder()
        run = self.context.known("run")
        return Path(run.checkpoints) / f"step_{self.context.step:06d}"

    # -- reporting --------------------------------------------------------------------------------

    def report(self, *, wait: bool = False) -> list[SaveResult]:
        """Report the checkpoints that are durable, or could not be written.

        Raises:
            CheckpointError: one could not be written, and the settings say that training stops.
        """
        with self.record.phases.span("checkpoints"):
            if wait:
                self._saver.wait()
            results = self._saver.finished()
        self._in_flight -= len(results)
        failure: CheckpointError | None = None
        stops = self.settings.on_failure == "stop"
        for result in results:
            if result.error is not None:
                failure = result.error
                goes_on = " Training continues; earlier checkpoints are as they were."
                log.error("%s%s", result.error, "" if stops else goes_on)
            else:
                self._check_duration(result.seconds)
            if self.ranks.is_distributed:
                self._unsent.append(result)
            self._announce(result)
        if failure is not None and stops:
            raise failure
        return results

    def _announce(self, result: SaveResult) -> None:
        """Tell the run and the hooks that a checkpoint is durable, or that it failed."""
        step, requested = result.info["step"], str(result.requested)
        if result.path is None:
            self.record.event("checkpoint_failed", path=requested, step=step, error=result.error)
            for name in self.hooks:
                failed = getattr(self.hooks.get_hook(name), "checkpoint_failed", None)
                if failed is not None:
                    failed(requested, result.error)
            return
        where = {name: result.info[name] for name in ("step", "epoch", "tokens_seen")}
        self.is_announcing = True
        try:
            report_checkpoint(self.context, self.hooks, self.record, result.path, **where)
        finally:
            self.is_announcing = False

    def broadcast_saved(self) -> None:
        """Report in all ranks what rank 0 has saved. All of them have to call this."""
        if not self.ranks.is_distributed:
            return
        unsent, self._unsent = self._unsent, []
        saved: list[SaveResult] = self.ranks.processes.broadcast(unsent)
        if self.ranks.processes.is_main:
            return
        self._saver.release_shards([result.requested.absolute() for result in saved])
        for result in self._saver.finished():
            if result.error is not None:
                log.error("%s", result.error)
        for result in saved:
            self._announce(result)

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

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, *, failed: bool) -> None:
        """Wait for the checkpoint that is being written, and report it."""
        if not self.is_busy:
            return
        try:
            self.report(wait=True)
        except HooklineError:
            if not failed:
                raise
            log.exception("The last checkpoint could not be saved.")

    def serve_end(self, fire: Callable[[], None]) -> None:
        """Fire `on_train_end` in all ranks; what a hook of one of them saves, all of them save.

        A hook in rank 0 saves at once, and the others wait for that after their own hooks.
        """
        processes, requests = self.ranks.processes, self.requests
        self.is_serving_end = True
        try:
            fire()
            if processes.is_main:
                processes.broadcast([])
            while not processes.is_main and (asked := processes.broadcast(None)):
                self.save(asked, wait=True)
                requests.checkpoints = [one for one in requests.checkpoints if one not in asked]
            save, toggled = processes.any(bool(requests.checkpoints), self.ranks.hooks_toggled)
            if save:
                self.save(self.with_folders(self.gather_requests()), wait=True)
            if toggled:
                self.ranks.apply_toggles()
        finally:
            self.is_serving_end = False

    def close(self) -> None:
        """Wait for what is being written, report it, and free the memory."""
        try:
            self.report(wait=True)
        finally:
            self._saver.close()
