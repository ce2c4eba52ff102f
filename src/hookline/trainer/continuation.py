"""Finding the checkpoint that a trainer continues from, and restoring the trainer from it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.checkpoint import find_checkpoint
from hookline.checkpoint.remote import fetch_checkpoint
from hookline.errors import RunError
from hookline.loop.restoring import compare_checkpoint, load_fitting
from hookline.loop.saved_state import check_trainer_state
from hookline.masking import mask_secrets
from hookline.runs.diff import diff_configs
from hookline.runs.identity import Identity
from hookline.runs.jsonable import to_jsonable
from hookline.runs.manifest import read_run_manifest
from hookline.runs.run_lookup import find_run_of_checkpoint
from hookline.runs.run_reader import OpenedRun
from hookline.runs.unfinished_runs import check_crash_loop, find_unfinished_run
from hookline.trainer.position_checks import describe_position
from hookline.trainer.shared_reading import read_checkpoint
from hookline.trainer.state_items import describe_gradients

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

__all__ = ["describe_trainer_position", "find_start", "load_trainer_checkpoint"]

_SHOWN = 5


def find_start(trainer: Trainer, identity: Identity, resume_from: Any) -> Path | None:
    """Return the checkpoint that training continues from; None to start a new run.

    Args:
        trainer: the trainer.
        identity: what it trains.
        resume_from: the folder or URL of a checkpoint or run, or "auto" for the newest unfinished
            run of the same training. If the newest checkpoint is damaged, an older one is used.
    """
    given, runs = os.fspath(resume_from), trainer.config.runs
    if given == "auto":
        if runs is None:
            return None
        found, message = find_unfinished_run(runs, identity.describe(trainer.hooks.describe()))
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


def load_trainer_checkpoint(
    trainer: Trainer, found: Path, *, strict: bool = True
) -> Mapping[str, Any]:
    """Restore a trainer from a checkpoint, after comparing all of it; return the saved state.

    Args:
        trainer: the trainer; it is not changed if the checkpoint does not fit.
        found: the checkpoint.
        strict: raise if something does not fit, apart from hooks; otherwise load what fits.
    """
    loop, model = trainer.loop, trainer.model
    checkpoint = read_checkpoint(trainer, found)
    check_trainer_state(checkpoint)
    checkpoint = compare_checkpoint(
        checkpoint,
        loop.state,
        trainer.hooks,
        model,
        trainer.strategy.processes,
        what=f"this trainer and its {type(model).__name__}",
        advice="Resume with the model and the optimizers of the run, load what fits with "
        "fit(…, strict=False), or start a new run.",
        strict=strict,
        describe_more=partial(describe_trainer_position, trainer),
        describe_unloadable=partial(describe_gradients, trainer.optimizers),
        more=lambda: _other_settings(trainer, find_run_of_checkpoint(found)),
    )
    load_fitting(checkpoint, loop.state, model)
    return checkpoint.state


def describe_trainer_position(trainer: Trainer, state: Mapping[str, Any]) -> list[str]:
    """Return why a trainer cannot continue at a saved position in its data, one line each."""
    val_loaders = () if trainer.val_data is None else trainer.val_data.loaders
    fast_forward = trainer.config.fast_forward
    saved = state["position"]
    return describe_position(saved, trainer.train_data, val_loaders, fast_forward=fast_forward)


def _other_settings(trainer: Trainer, folder: Path | None) -> list[str]:
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
