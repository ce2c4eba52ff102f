"""The checkpoints of a loop that is not ours: saved between its steps, and loaded into it.

What a hook requests in a step is saved between this step and the next, when the loop has updated
its schedulers and its scaler. The random states are those at the end of the step: what is drawn for
the next batch is drawn again after resuming.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from hookline.checkpoint import Checkpoint, find_checkpoint
from hookline.checkpoint.folder import load_checkpoint
from hookline.errors import CheckpointError, LoopError
from hookline.integrations.bare_loop.optimizer_watch import AwaitedOptimizer, has_step_hooks
from hookline.integrations.bare_loop.session import LoadedCheckpoint
from hookline.integrations.bare_loop.step_watch import StepWatch
from hookline.loop.control_requests import SaveRequest
from hookline.loop.event_context import device_of
from hookline.loop.loop import Loop, announce
from hookline.loop.model_watch import ModelCallback, is_compiled_in_place, models_in
from hookline.loop.processes import (
    SingleProcessGroup,
    broadcast_from_main,
    is_main_process,
    world_size,
)
from hookline.loop.random_state import random_state
from hookline.loop.rank_sync import trains_together, wait_for_ranks
from hookline.loop.saved_state import check_session_state
from hookline.runs.identity import Identity
from hookline.tensors.hidden_hooks import hide_hooks, unhide_hooks

log = logging.getLogger("hookline")


class SessionSaves:
    """Saves between the steps of a loop, and loads what was saved.

    Args:
        loop: the loop.
        watch: watches its model and optimizers.

    Attributes:
        on_saved: called when what was saved at a boundary is durable, with its folder in rank 0;
            None if training does not wait for that.
    """

    def __init__(self, loop: Loop, watch: StepWatch) -> None:
        self._loop, self._watch = loop, watch
        for optimizer in loop.context.optimizers:
            _check_has_state(optimizer)
        self._boundary = _StepBoundary(weakref.proxy(self), loop.context.model, watch)
        self._agreed: list[SaveRequest] = []  # with their folders; to be saved at the boundary
        self._random: dict[str, Any] | None = None  # at the end of the step; None: not known yet
        self._has_ended = False
        self.on_saved: Callable[[Path | None], None] | None = None

    def random(self) -> dict[str, Any]:
        """Return the random states of a checkpoint."""
        return self._random or random_state(device_of(self._loop.context.model))

    @property
    def _is_together(self) -> bool:
        """Whether all ranks write a checkpoint together, each its shards."""
        return self._loop.is_sharded and self._loop.ranks.is_distributed

    # -- saving -----------------------------------------------------------------------------------

    def save(self, request: SaveRequest, extra: Mapping[str, Any], *, wait: bool) -> Path | None:
        """Save now; return the folder if it is durable already.

        Rank 0 writes, and a sharded model is written by all ranks. If all of them call this, the
        checkpoint has the state of each.
        """
        loop, checkpoints = self._loop, self._loop.checkpoints
        if self._is_together and loop.context.status in ("error", "interrupted"):
            log.warning(
                "A checkpoint was requested and is not saved: the loop ended with an exception, "
                "and all processes have to save a sharded model together."
            )
            return None
        if checkpoints.is_serving_end:
            return checkpoints.save_while_ending(request, extra)
        if self._is_together:
            wait_for_ranks("save_checkpoint")
            together = True
        else:
            together = not self._has_ended and loop.ranks.begin_save()
        if not together and not loop.ranks.processes.is_main:
            return None
        self.save_requested()
        (request,) = checkpoints.with_folders([request], in_all_ranks=together)
        checkpoints.extra = dict(extra)
        return checkpoints.save([request], wait=wait, together=together)

    def request(self, request: SaveRequest, extra: Mapping[str, Any]) -> None:
        """Save before the next step begins; several ranks agree on it until then."""
        loop = self._loop
        if request.path is None:
            loop.checkpoints.check_folder()
        loop.requests.checkpoint(request)
        loop.checkpoints.extra |= extra

    def event_ended(self) -> None:
        """Wait for the next step, if something was requested and gradients are not in use."""
        ranks, requests = self._loop.ranks, self._loop.requests
        if not ranks.is_distributed and requests.checkpoints and not self._watch.has_new_gradients:
            self.wait_for_boundary()

    def wait_for_boundary(self) -> None:
        """Save at the next boundary what any rank has requested. All ranks call this together."""
        loop = self._loop
        asked = loop.checkpoints.with_folders(loop.checkpoints.gather_requests())
        self._agreed = list(dict.fromkeys([*self._agreed, *asked]))
        self._random = random_state(device_of(loop.context.model))
        if not self._is_together:
            loop.checkpoints.gather_states()  # the ranks do not meet at the boundary
        self._boundary.watch()

    def save_requested(self) -> None:
        """Save what was agreed on: the next step begins, or training ends."""
        self._boundary.stop()
        if self._agreed:
            requests, self._agreed = self._agreed, []
            waits = self.on_saved is not None
            saved = self._loop.checkpoints.save(requests, wait=waits, together=self._is_together)
            self._random = None
            if self.on_saved is not None:
                self.on_saved(saved)

    def finish(self, *, failed: bool, together: bool) -> None:
        """Save what was requested, wait for what is being written, and report it.

        After an exception (`failed`), nothing more is saved; `together` if all ranks end now.
        """
        self._boundary.stop()
        loop = self._loop
        if not loop.ranks.is_distributed and loop.requests.checkpoints and not failed:
            self.wait_for_boundary()
            self._boundary.stop()
        if not failed and (together or not self._is_together):
            self.save_requested()
        elif waiting := [*self._agreed, *loop.requests.checkpoints]:
            log.warning(
                "The checkpoint %s was requested, but not saved: the loop ended early, with an "
                "exception that may have happened within a step.",
                waiting[0].path or f"of step {loop.context.step}",
            )
        loop.checkpoints.finish(failed=failed)
        self._has_ended = True

    def leave(self) -> None:
        """Stop watching the model."""
        self._boundary.detach()

    # -- loading ----------------------------------------------------------------------------------

    def load(self, path: Path) -> tuple[Checkpoint, LoadedCheckpoint]:
        """Restore the loop's objects from a checkpoint."""
        loop = self._loop
        checkpoint = load_checkpoint(path)
        check_session_state(checkpoint)
        state = checkpoint.state
        if state.get("ranks") is None:  # rank 0 has saved alone
            state.pop("ranks", None)
            state["random"] = state.get("random") if is_main_process() else None
            processes = SingleProcessGroup()
        else:
            processes = self._loading_ranks(len(state["ranks"]))
        loop.state.restore_checkpoint(
            checkpoint,
            processes,
            what=f"this {type(loop.context.model).__name__}",
            advice="Attach the model, the optimizers and the schedulers that it was saved with, "
            "or start anew.",
        )
        loop.context.validated = dict(checkpoint.info.get("metrics") or {})
        extra, random = state.get("extra", {}), state.get("random")
        device = device_of(loop.context.model)
        loaded = LoadedCheckpoint(path, state["step"], state["epoch"], extra, random, device)
        return checkpoint, loaded

    def _loading_ranks(self, saved: int) -> SingleProcessGroup:
        """Return which of how many ranks this process is, which may not have joined yet."""
        context, processes = self._loop.context, SingleProcessGroup()
        together = trains_together(context.model, context.optimizers)
        if together or (saved == world_size() and dist.is_initialized()):
            processes.rank, processes.size = dist.get_rank(), dist.get_world_size()
        return processes

    def find(
        self, given: str, runs: Any, identity: Identity | None, others: Sequence[Identity]
    ) -> Path | None:
        """Return the checkpoint to load; None if "auto" finds nothing to continue.

        A run is found by its identity, or as earlier versions would have described it (`others`).
        """
        context = self._loop.context
        if trains_together(context.model, context.optimizers):
            wait_for_ranks("load_checkpoint")
        if given != "auto":
            return find_checkpoint(given, verify=True)
        found = self._find_run(runs, identity, others) if is_main_process() else None
        decided: Path | None = broadcast_from_main(found)
        return decided

    def _find_run(
        self, runs: Any, identity: Identity | None, others: Sequence[Identity]
    ) -> Path | None:
        from hookline.runs.restart import find_unfinished_run
        from hookline.runs.run import Run

        if isinstance(runs, Run):
            try:
                return find_checkpoint(runs.path, verify=True)
            except CheckpointError:
                return None
        if runs is None or identity is None:
            return None
        hooks = self._loop.hooks.describe()
        here, *further = ({**one.describe(hooks), "name": one.name} for one in (identity, *others))
        found, message = find_unfinished_run(Path(os.fspath(runs)), here, *further)
        announce(message)
        return found


def _check_has_state(optimizer: Any) -> None:
    """Raise for an object like an optimizer whose state a checkpoint could not restore."""
    if isinstance(optimizer, AwaitedOptimizer) or has_step_hooks(optimizer):
        return
    kind = type(optimizer)
    methods = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    if not methods or not {"state", "param_groups"} <= optimizer.state_dict().keys():
        raise LoopError(
            f"The state of {kind.__name__} cannot be saved in a checkpoint. It needs `state_dict` "
            "and `load_state_dict`, with 'state' and 'param_groups' as in torch.optim.Optimizer. "
            "If it steps optimizers of torch, attach those instead."
        )


class _StepBoundary:
    """Saves before the next call of the model, or of a part of it if the model is never called.

    When `optimizer.step()` returns, the loop's schedulers and its scaler have not been updated yet.
    When a part of the model is called again, or the next step begins, they have.
    """

    def __init__(self, saves: SessionSaves, model: torch.nn.Module, watch: StepWatch) -> None:
        # The watch sees the calls of a model that was compiled in place.
        self._models = [each for each in models_in(model) if not is_compiled_in_place(each)]
        self._saves, self._watch = saves, watch
        self._handles: list[RemovableHandle] = []  # kept: a new hook would compile a model again
        self._part_handles: list[RemovableHandle] = []
        self._thread: int | None = None  # None while nobody waits

    def watch(self) -> None:
        """Wait for the next call."""
        self._thread = get_ident()
        compiled = all(hasattr(model, "_orig_mod") for model in self._models)
        if not self._handles and (compiled or self._watch.model.calls_seen):
            self._handles = [self._hook(model) for model in self._models]
        if not self._handles and not self._part_handles:
            parts = dict.fromkeys(part for model in self._models for part in model.modules())
            self._part_handles = [self._hook(part) for part in parts]

    def stop(self) -> None:
        """Stop waiting."""
        self._thread = None
        while self._part_handles:
            self._part_handles.pop().remove()

    def detach(self) -> None:
        """Remove all hooks from the model."""
        self.stop()
        while self._handles:
            self._handles.pop().remove()
        for model in self._models:
            for part in model.modules():
                unhide_hooks(part)

    def _hook(self, module: torch.nn.Module) -> RemovableHandle:
        hide_hooks(module)
        # First: FSDP2's own hook gathers the parameters, which are saved before that.
        callback = ModelCallback(self._before_call)
        return module.register_forward_pre_hook(callback, prepend=True)

    def _before_call(self, module: torch.nn.Module, args: Any) -> None:
        if get_ident() == self._thread:
            self.stop()
            self._saves.save_requested()
