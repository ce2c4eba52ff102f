"""What a checkpoint of a trainer consists of, and restoring a trainer from it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from hookline.checkpoint import find_checkpoint, load_checkpoint
from hookline.checkpoint.differences import fit_checkpoint
from hookline.checkpoint.remote import fetch_checkpoint
from hookline.checkpoint.state_tree import Encoder, decode
from hookline.runs.crash_loop import check_crash_loop
from hookline.runs.diff import diff_configs
from hookline.runs.jsonable import canonical_json, mask_secrets, to_jsonable
from hookline.runs.recorder import describe_loop
from hookline.runs.run_lookup import find_run_of_checkpoint
from hookline.runs.run_reader import OpenedRun
from hookline.runs.unfinished_runs import comparable_config, find_unfinished_run

if TYPE_CHECKING:
    from hookline.trainer.trainer_base import TrainerBase

__all__ = [
    "collect_checkpoint",
    "decode_states",
    "encode_states",
    "find_start",
    "load_trainer_checkpoint",
]

_SHOWN = 5
_COMPARED = ("hooks", "training")  # of a run's manifest, apart from the configuration


def collect_checkpoint(trainer: TrainerBase) -> dict[str, Any]:
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
    sync = [] if run is None else [run.metrics_file]
    return {"model": model, "state": state, "info": info, "sync": sync}


def encode_states(states: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return a copy of states that does not change; the tensors in it are not copied."""
    encoder = Encoder("state")
    return encoder.encode(dict(states)), encoder.tensors


def decode_states(encoded: tuple[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states that `encode_states` was given."""
    states: dict[str, Any] = decode(*encoded)
    return states


def find_start(trainer: TrainerBase, resume_from: Any) -> Path | None:
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
    trainer: TrainerBase, found: Path, *, strict: bool = True
) -> Mapping[str, Any]:
    """Restore a trainer from a checkpoint, after comparing all of it; return the saved state.

    Args:
        trainer: the trainer; it is not changed if the checkpoint does not fit.
        found: the checkpoint.
        strict: raise if something does not fit, apart from hooks; otherwise load what fits.
    """
    checkpoint = load_checkpoint(found)
    for name, value in trainer.model.state_dict(keep_vars=True).items():
        if is_lazy(value) and name in checkpoint.model:  # of a lazy module before its first call
            value.materialize(checkpoint.model[name].shape)
    checkpoint = fit_checkpoint(
        checkpoint,
        model=trainer.strategy.save(trainer.model),
        state=trainer.state_dict(),
        what=f"this trainer and its {type(trainer.model).__name__}",
        advice="Resume with the model and the optimizers of the run, load what fits with "
        "fit(…, strict=False), or start a new run.",
        strict=strict,
        more=lambda: _other_settings(trainer, find_run_of_checkpoint(found)),
    )
    trainer.check_data(checkpoint.state)
    trainer.strategy.load(trainer.model, checkpoint.model)
    trainer.load_state_dict(checkpoint.state)
    return checkpoint.state


def _other_settings(trainer: TrainerBase, folder: Path | None) -> list[str]:
    """Return a line about the settings that differ from those of the run, if they are known."""
    before = None if folder is None else OpenedRun(folder).manifest.get("config")
    if not isinstance(before, dict):
        return []
    pairs = diff_configs(before, to_jsonable(mask_secrets(trainer.config.model_dump(mode="json"))))
    changes = [f"{name} was {was!r} and is {now!r}" for name, (was, now) in pairs.items()]
    if len(changes) > _SHOWN:
        changes = [*changes[:_SHOWN], f"and {len(changes) - _SHOWN} more"]
    return [f"of the configuration, {', '.join(changes)}"] if changes else []
