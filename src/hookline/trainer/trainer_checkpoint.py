"""What a checkpoint of a trainer consists of, and restoring a trainer from it."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from hookline.checkpoint import Checkpoint, find_checkpoint
from hookline.checkpoint.differences import fit_checkpoint
from hookline.checkpoint.remote import fetch_checkpoint
from hookline.checkpoint.state_tree import Encoder, decode
from hookline.errors import CheckpointError, RunError
from hookline.loop.saved_state import check_trainer_state, reported_damage
from hookline.loop.state_differences import (
    describe_hook_states,
    describe_objects,
)
from hookline.masking import mask_secrets
from hookline.runs.crash_loop import check_crash_loop
from hookline.runs.diff import diff_configs
from hookline.runs.jsonable import canonical_json, to_jsonable
from hookline.runs.manifest import read_run_manifest
from hookline.runs.recorder import describe_loop
from hookline.runs.run_lookup import find_run_of_checkpoint
from hookline.runs.run_reader import OpenedRun
from hookline.runs.unfinished_runs import comparable_config, find_unfinished_run
from hookline.trainer.position_checks import describe_position
from hookline.trainer.rank_states import adapt_rank_states
from hookline.trainer.shared_reading import read_checkpoint
from hookline.trainer.strategies import parameters_of

if TYPE_CHECKING:
    from hookline.trainer.trainer_state import TrainerState

__all__ = [
    "collect_checkpoint",
    "decode_states",
    "describe_state",
    "describe_unloadable",
    "encode_states",
    "find_start",
    "load_trainer_checkpoint",
    "unchanged_on_failure",
]

_SHOWN = 5
_COMPARED = ("hooks", "training")  # of a run's manifest, apart from the configuration


def collect_checkpoint(trainer: TrainerState) -> dict[str, Any]:
    """Return the arguments of `CheckpointSaver.save`: `model`, `state`, `info` and `sync`."""
    state, run = trainer.state_dict(), trainer.run
    info = {
        "step": trainer.step,
        "epoch": trainer.epoch,
        "tokens_seen": trainer.known_tokens,
        "run_id": None if run is None else run.id,
        "metrics": state["position"]["validated"],
    }
    model = trainer.strategy.save(trainer.model)
    sync = [run.metrics_file] if run is not None and trainer.strategy.is_main else []
    return {"model": model, "state": state, "info": info, "sync": sync}


def encode_states(states: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return a copy of states that does not change; the tensors in it are not copied."""
    encoder = Encoder("state")
    return encoder.encode(dict(states)), encoder.tensors


def decode_states(encoded: tuple[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states that `encode_states` was given."""
    states: dict[str, Any] = decode(*encoded)
    return states


def find_start(trainer: TrainerState, resume_from: Any) -> Path | None:
    """Return the checkpoint that training continues from; None to start a new run.

    Args:
        trainer: the trainer.
        resume_from: the folder or URL of a checkpoint or run, or "auto" for the newest unfinished
            run of the same training. If the newest checkpoint is damaged, an older one is used.
    """
    given, runs = os.fspath(resume_from), trainer.config.runs
    if given == "auto":
        if runs is None:
            return None
        here = describe_loop(
            trainer.config.model_dump(mode="json"), trainer.hooks.describe(), trainer
        )
        found, message = find_unfinished_run(runs, lambda there: _is_same(there, here))
        trainer.announce(message)
        return found
    if "://" in given:
        into = Path(tempfile.mkdtemp()) if runs is None else runs / "fetched"
        return fetch_checkpoint(given, into)
    checkpoint = find_checkpoint(Path(given), verify=True)
    folder = find_run_of_checkpoint(checkpoint)
    if folder is not None and runs is not None:
        read_run_manifest(folder)  # raises before anything is loaded, if it cannot be continued
    if folder is not None and checkpoint.resolve() != Path(given).resolve():
        check_crash_loop(folder, checkpoint)  # not for a checkpoint that is named
    return checkpoint


def _is_same(manifest: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether a run has this configuration, these hooks, and this model and data."""
    config = manifest.get("config")
    return (
        isinstance(config, dict)
        and comparable_config(config) == comparable_config(here["config"])
        and all(canonical_json(manifest.get(n)) == canonical_json(here[n]) for n in _COMPARED)
    )


def load_trainer_checkpoint(
    trainer: TrainerState, found: Path, *, strict: bool = True
) -> Mapping[str, Any]:
    """Restore a trainer from a checkpoint, after comparing all of it; return the saved state.

    Args:
        trainer: the trainer; it is not changed if the checkpoint does not fit.
        found: the checkpoint.
        strict: raise if something does not fit, apart from hooks; otherwise load what fits.
    """
    checkpoint = read_checkpoint(trainer, found)
    check_trainer_state(checkpoint)
    weights = dict(trainer.strategy.save(trainer.model))
    lazy: dict[str, Any] = {}  # parameters of a lazy module before its first call
    for name, value in trainer.model.state_dict(keep_vars=True).items():
        if is_lazy(value) and isinstance(checkpoint.model.get(name), torch.Tensor):
            lazy[name], weights[name] = value, checkpoint.model[name]
    before = trainer.state_dict()
    with reported_damage(checkpoint):
        adapt_rank_states(trainer, checkpoint.state)
        checkpoint = fit_checkpoint(
            checkpoint,
            model=weights,
            state=before,
            what=f"this trainer and its {type(trainer.model).__name__}",
            advice="Resume with the model and the optimizers of the run, load what fits with "
            "fit(…, strict=False), or start a new run.",
            strict=strict,
            unloadable=describe_unloadable(trainer, checkpoint.state),
            problems=describe_state(trainer, checkpoint.state),
            more=lambda: _other_settings(trainer, find_run_of_checkpoint(found)),
        )
    for name, value in lazy.items():
        value.materialize(checkpoint.model[name].shape)
    with unchanged_on_failure(trainer, before, checkpoint):
        trainer.load_state_dict(checkpoint.state)
        trainer.strategy.load(trainer.model, checkpoint.model)
    return checkpoint.state


def describe_state(trainer: TrainerState, state: Mapping[str, Any]) -> list[str]:
    """Return what else a trainer cannot load: the states of hooks, the position in the data."""
    val_loaders = () if trainer.val_data is None else trainer.val_data.loaders
    lines = describe_hook_states(trainer.hooks, state["hooks"], trainer.model)
    lines += describe_position(
        state["position"],
        trainer.train_data,
        val_loaders,
        fast_forward=trainer.config.fast_forward,
    )
    return lines


def describe_unloadable(
    trainer: TrainerState, state: Mapping[str, Any]
) -> dict[tuple[str, int], list[str]]:
    """Return what a trainer cannot load of its optimizers, …, by section and index."""
    found = describe_objects(
        state,
        optimizers=trainer.optimizers,
        schedulers=trainer.schedulers,
        scaler=trainer.strategy.scaler,
    )
    gradients = state["pending_gradients"]
    if len(gradients) != len(trainer.optimizers) or not all(
        map(_have_shapes, gradients, trainer.optimizers)
    ):
        line = "the gradients of the step in progress are those of other parameters"
        found["pending_gradients", -1] = [line]
    return found


def _have_shapes(gradients: list[Any] | None, optimizer: torch.optim.Optimizer) -> bool:
    if gradients is None:
        return True
    parameters = parameters_of(optimizer)
    return len(gradients) == len(parameters) and all(
        gradient is None or gradient.shape == parameter.shape
        for gradient, parameter in zip(gradients, parameters, strict=True)
    )


@contextmanager
def unchanged_on_failure(
    trainer: TrainerState, before: Mapping[str, Any], checkpoint: Checkpoint
) -> Generator[None]:
    """Put a trainer back to a state if loading a checkpoint fails in the block.

    Args:
        trainer: the trainer.
        before: its state.
        checkpoint: the checkpoint that is loaded.

    Raises:
        CheckpointError: loading failed.
    """
    is_plain = all(isinstance(value, torch.Tensor) for value in checkpoint.model.values())
    weights = None if is_plain else copy.deepcopy(trainer.strategy.save(trainer.model))
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # the first error matters more
            trainer.load_state_dict(before)
            for info in trainer.hooks.describe():
                if info.status == "disabled" and info.name not in before["disabled"]:
                    trainer.hooks.enable_hook(info.name)
            if weights is not None:  # tensors that were compared do not fail
                trainer.strategy.load(trainer.model, weights)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The checkpoint {checkpoint.path} could not be loaded, and nothing was changed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _other_settings(trainer: TrainerState, folder: Path | None) -> list[str]:
    """Return a line about the settings that differ from those of the run, if they are known."""
    try:
        before = None if folder is None else OpenedRun(folder).manifest.get("config")
    except RunError:  # the differences matter more
        before = None
    if not isinstance(before, dict):
        return []
    pairs = diff_configs(before, mask_secrets(to_jsonable(trainer.config.model_dump(mode="json"))))
    changes = [f"{name} was {was!r} and is {now!r}" for name, (was, now) in pairs.items()]
    if len(changes) > _SHOWN:
        changes = [*changes[:_SHOWN], f"and {len(changes) - _SHOWN} more"]
    return [f"of the configuration, {', '.join(changes)}"] if changes else []
