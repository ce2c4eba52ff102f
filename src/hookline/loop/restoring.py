"""Restoring a loop from a checkpoint: read it, compare all of it, load it, or undo what was loaded.

Nothing of the loop is changed before everything was compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hookline.checkpoint import Checkpoint
from hookline.checkpoint.differences import fit_checkpoint
from hookline.dispatch import HookManager
from hookline.errors import CheckpointError
from hookline.loop.loading import load_weights
from hookline.loop.loop_state import LoopState
from hookline.loop.processes import OneProcess
from hookline.loop.saved_state import reported_damage
from hookline.loop.state_differences import describe_hook_states, describe_objects

__all__ = ["compare_checkpoint", "load_fitting", "unchanged_on_failure"]


def compare_checkpoint(
    checkpoint: Checkpoint,
    state: LoopState,
    hooks: HookManager,
    model: torch.nn.Module,
    processes: OneProcess,
    *,
    what: str,
    advice: str,
    strict: bool,
    describe_more: Callable[[Mapping[str, Any]], Sequence[str]],
    describe_unloadable: Callable[[Mapping[str, Any]], Mapping[tuple[str, int], list[str]]]
    | None = None,
    more: Callable[[], list[str]] = list,
) -> Checkpoint:
    """Return a checkpoint as the loop can load it, after comparing all of it.

    Args:
        checkpoint: what was read, of the right form.
        state: the loop's state.
        hooks: its hooks.
        model: its model, with the weights' own names.
        processes: the ranks that load it.
        what: what it is loaded into, for messages.
        advice: what to do if it does not fit, for messages.
        strict: raise if something does not fit, apart from hooks; otherwise load what fits.
        describe_more: returns why the driver cannot load the state, one line each.
        describe_unloadable: returns what else of the state cannot be loaded, by section and index.
        more: returns further lines for the message.

    Raises:
        CheckpointError: it does not fit.
    """
    saved = checkpoint.state
    weights = dict(model.state_dict())
    weights |= {name: checkpoint.model[name] for name in _lazy_parameters(model, checkpoint)}
    with reported_damage(checkpoint):
        state.adapt(saved, processes)
        objects = describe_objects(
            saved,
            optimizers=state.optimizers,
            schedulers=state.schedulers,
            scaler=state.scaler,
        )
        if describe_unloadable is not None:
            objects |= describe_unloadable(saved)
        return fit_checkpoint(
            checkpoint,
            model=weights,
            state=state.collect(),
            what=what,
            advice=advice,
            strict=strict,
            unloadable=objects,
            problems=[*describe_hook_states(hooks, saved["hooks"], model), *describe_more(saved)],
            more=more,
        )


def load_fitting(checkpoint: Checkpoint, state: LoopState, model: torch.nn.Module) -> None:
    """Load a checkpoint that fits into the loop's objects, its model last.

    Raises:
        CheckpointError: loading failed; the loop is as it was.
    """
    for name, value in _lazy_parameters(model, checkpoint).items():
        value.materialize(checkpoint.model[name].shape)
    with unchanged_on_failure(checkpoint, state, model):
        state.restore(checkpoint.state)
        load_weights(model, checkpoint.model)


@contextmanager
def unchanged_on_failure(
    checkpoint: Checkpoint, state: LoopState, model: torch.nn.Module
) -> Generator[None]:
    """Put a loop back to its state if loading a checkpoint fails in the block.

    Raises:
        CheckpointError: loading failed.
    """
    before = state.collect()
    is_plain = all(isinstance(value, torch.Tensor) for value in checkpoint.model.values())
    weights = None if is_plain else copy.deepcopy(model.state_dict())
    try:
        yield
    except Exception as error:
        state.undo(before)
        if weights is not None:  # tensors that were compared do not fail
            with suppress(Exception):  # the first error matters more
                load_weights(model, weights)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The checkpoint {checkpoint.path} could not be loaded, and nothing was changed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _lazy_parameters(model: torch.nn.Module, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the parameters of lazy modules before their first call, which the checkpoint has."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if is_lazy(value) and isinstance(checkpoint.model.get(name), torch.Tensor)
    }
