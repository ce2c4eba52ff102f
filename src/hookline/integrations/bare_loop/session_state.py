"""What a checkpoint of a bare loop consists of, and restoring the loop's objects from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hookline.checkpoint.checkpoint_folder import Checkpoint, load_checkpoint
from hookline.checkpoint.differences import fit_checkpoint
from hookline.errors import CheckpointError
from hookline.integrations.bare_loop.loaded_checkpoint import LoadedCheckpoint
from hookline.integrations.bare_loop.loop_agreement import trains_together
from hookline.loop.event_context import device_of
from hookline.loop.loading import load_optimizer, load_weights
from hookline.loop.means import add_means
from hookline.loop.model_watch import ModelGroup
from hookline.loop.processes import is_main_process, world_size
from hookline.loop.random_state import random_state
from hookline.loop.saved_state import check_session_state, reported_damage
from hookline.loop.state_differences import (
    describe_hook_states,
    describe_objects,
    describe_random_state,
)

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.attached_loop import AttachedLoop

__all__ = [
    "collect_progress",
    "collect_session",
    "rank_state",
    "read_for_session",
    "restore_progress",
    "restore_session",
]


def collect_session(
    session: AttachedLoop,
    random: Mapping[str, Any],
    extra: Mapping[str, Any],
    rank_states: list[Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of `CheckpointSaver.save`: `model`, `state`, `info` and `sync`.

    Args:
        session: the session.
        random: the random states at the end of the step.
        extra: the loop's own values.
        rank_states: what `rank_state` returned in all processes, if all of them save together.
    """
    context, scaler, run = session._context, session.scaler, session.run
    state = {
        "classes": {
            "optimizers": [type(optimizer).__name__ for optimizer in session.optimizers],
            "schedulers": [type(scheduler).__name__ for scheduler in session.schedulers],
        },
        "optimizers": [optimizer.state_dict() for optimizer in session.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in session.schedulers],
        "scaler": None if scaler is None else scaler.state_dict(),
        **collect_progress(session),
        **rank_state(session, random),
        "extra": dict(extra),
    }
    if rank_states is not None:
        state["ranks"] = rank_states
    info = {
        "step": context.step,
        "epoch": context.known_epoch,
        "tokens_seen": context.known_tokens,
        "run_id": None if run is None else run.id,
        "metrics": dict(session._validated),
    }
    sync = [] if run is None else [run.metrics_file]
    model = unwrapped(session.model).state_dict()
    return {"model": model, "state": state, "info": info, "sync": sync}


def collect_progress(session: AttachedLoop) -> dict[str, Any]:
    """Return what a checkpoint has of the hooks, the counters and the run."""
    context, recorder, agreement = session._context, session._recorder, session._agreement
    epoch, is_over = context.known_epoch, session._epoch_is_over
    return {
        "hooks": session.hooks.state_dict(),
        "attributes": session._attribute_states(),
        "disabled": [info.name for info in session.hooks.describe() if info.status == "disabled"],
        "step": context.step,
        "epoch": epoch + 1 if epoch is not None and is_over else epoch,
        "best_accuracy": session.best_accuracy,
        "run": None if recorder is None else recorder.position(),
        "logged": {} if recorder is None else recorder.unwritten_values(),
        "unreported": [] if agreement is None else agreement.records.own_values(),
    }


def rank_state(session: AttachedLoop, random: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the state that each process has of its own."""
    context = session._context
    return {
        "means": {} if session._epoch_is_over else context.means.state_dict(),
        "tokens_seen": context.known_tokens,
        "random": dict(random),
    }


def _adapt_rank_states(session: AttachedLoop, state: dict[str, Any]) -> None:
    """Replace the parts of a state that each process has by those of this process.

    A process that has no random state in the checkpoint keeps its own.
    """
    rank, size, saved = 0, 1, state.pop("ranks", None)
    together = trains_together(session.model, session.optimizers)
    if together or (saved is not None and len(saved) == world_size() and dist.is_initialized()):
        rank, size = dist.get_rank(), dist.get_world_size()
    if saved is None:
        state["random"] = state.get("random") if is_main_process() else None
    elif len(saved) == size:
        state.update(saved[rank])
    else:
        tokens = [one["tokens_seen"] for one in saved]
        state["random"] = saved[rank]["random"] if rank < len(saved) else None
        state["means"] = add_means([one["means"] for one in saved]) if not rank else {}
        state["tokens_seen"] = None if None in tokens else sum(tokens) // size


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DDP and `torch.compile`, whose weights have the model's own names."""
    if isinstance(model, ModelGroup):
        inner_models = [unwrapped(each) for each in model]
        are_own = all(a is b for a, b in zip(inner_models, model, strict=True))
        return model if are_own else ModelGroup(inner_models)
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
        inner = inner.module
    return model if inner is model else unwrapped(inner)


def read_for_session(session: AttachedLoop, found: Path, *, strict: bool) -> Checkpoint:
    """Read a checkpoint, after comparing all of it with the session."""
    checkpoint = load_checkpoint(found)
    check_session_state(checkpoint)
    _adapt_rank_states(session, checkpoint.state)
    here, state = collect_session(session, {}, {}), checkpoint.state
    with reported_damage(checkpoint):
        problems = describe_hook_states(session.hooks, state["hooks"], unwrapped(session.model))
        if state.get("random") is not None:
            problems += describe_random_state(state["random"])
        return fit_checkpoint(
            checkpoint,
            model=here["model"],
            state=here["state"],
            what=f"this {type(session.model).__name__}",
            advice="Attach the model, the optimizers and the schedulers that it was saved with, "
            "load what fits with load_checkpoint(…, strict=False), or start anew.",
            strict=strict,
            unloadable=describe_objects(
                state,
                optimizers=session.optimizers,
                schedulers=session.schedulers,
                scaler=session.scaler,
            ),
            problems=problems,
        )


def restore_session(session: AttachedLoop, checkpoint: Checkpoint) -> LoadedCheckpoint:
    """Load a checkpoint that fits into the model, the optimizers, … and the counters.

    Raises:
        CheckpointError: Loading failed; the session is as it was.
    """
    model = unwrapped(session.model)
    before = collect_session(session, random_state(device_of(session.model)), {})
    is_plain = all(isinstance(value, torch.Tensor) for value in checkpoint.model.values())
    weights = None if is_plain else copy.deepcopy(before["model"])
    try:
        loaded = _restore_state(session, checkpoint.path, checkpoint.state)
        load_weights(model, checkpoint.model)
    except Exception as error:
        with suppress(Exception):  # the first error matters more
            _restore_state(session, checkpoint.path, before["state"])
            for info in session.hooks.describe():
                if info.status == "disabled" and info.name not in before["state"]["disabled"]:
                    session.hooks.enable_hook(info.name)
            if weights is not None:  # tensors that were compared do not fail
                model.load_state_dict(weights)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The checkpoint {checkpoint.path} could not be loaded, and nothing was changed: "
            f"{type(error).__name__}: {error}"
        ) from error
    return loaded


def _restore_state(session: AttachedLoop, path: Path, state: Mapping[str, Any]) -> LoadedCheckpoint:
    for optimizer, saved in zip(session.optimizers, state["optimizers"], strict=True):
        load_optimizer(optimizer, saved)
    for scheduler, saved in zip(session.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if session.scaler is not None and state["scaler"] is not None:
        session.scaler.load_state_dict(state["scaler"])
    restore_progress(session, state)
    loaded = LoadedCheckpoint(
        path,
        state["step"],
        state["epoch"],
        state.get("extra", {}),
        state.get("random"),
        device_of(session.model),
    )
    loaded.restore_random_state()
    return loaded


def restore_progress(session: AttachedLoop, state: Mapping[str, Any]) -> None:
    """Restore the hooks and the counters."""
    context = session._context
    session.hooks.load_state_dict(state["hooks"])
    session._load_attribute_states(state.get("attributes", {}))
    for name in state["disabled"]:
        if name in session.hooks:
            session.hooks.disable_hook(name)
    context.step, context.step_in_progress = state["step"], state["step"] + 1
    context.known_epoch = state["epoch"] - 1 if state["epoch"] else None
    if state["tokens_seen"] is not None:
        context.known_tokens = state["tokens_seen"]
        session._supplied.add("tokens")
    context.means.load_state_dict(state["means"])
    session._resumed_epoch = state["epoch"]
    session.best_accuracy = state["best_accuracy"]
