"""Continuing a run: find its checkpoint, read it in all processes, compare it, restore the trainer.

Each process reads what it needs. Settings that differ from those that the checkpoint was saved with
are reported.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.checkpoint import find_checkpoint
from hookline.checkpoint.checkpoint_folder import Checkpoint, CheckpointShare, load_checkpoint
from hookline.checkpoint.remote import fetch_checkpoint
from hookline.config.trainer_config import TrainerConfig
from hookline.errors import CheckpointError, RunError
from hookline.loop.saved_state import check_trainer_state
from hookline.masking import mask_secrets
from hookline.printable import printable
from hookline.runs.diff import diff_configs, number_items
from hookline.runs.identity import Identity
from hookline.runs.jsonable import to_jsonable
from hookline.runs.manifest import read_run_manifest
from hookline.runs.run_lookup import find_run_of_checkpoint, shorten_path
from hookline.runs.run_reader import OpenedRun
from hookline.runs.unfinished_runs import check_crash_loop, find_unfinished_run
from hookline.tensors.sharded import is_sharded
from hookline.trainer.strategies import parameters_of

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

__all__ = ["describe_settings", "read_checkpoint", "resume"]

log = logging.getLogger("hookline")

_SHOWN = 5
_USED = (  # a resumed run uses the new value
    *("precision", "accumulate", "clip_norm", "clip_value", "on_nan", "loaders"),
    *("optimizer_every", "scheduler_every", "validate_every_epochs", "validate_every_steps"),
)
_RESTORED = ("optimizers", "schedulers", "seed")  # it uses the checkpoint's
_OF_OPTIMIZER = re.compile(r"\['optimizers'\]\[(\d+)\]\['state'\]\[(\d+)\]\[[^\[\]]*\]")
_AVERAGE = re.compile(r"\['hooks'\]\['[^']*'\]\['averages'\]\['([^']*)'\]")


def resume(
    trainer: Trainer, identity: Identity, resume_from: Any, *, strict: bool
) -> tuple[Path | None, dict[str, Any]]:
    """Restore a trainer from the checkpoint of the run that it continues, in all processes.

    Return the checkpoint, None if a new run starts, and the settings that the run then has.

    Args:
        trainer: the trainer.
        identity: what it trains.
        resume_from: the folder or URL of a checkpoint or run, or "auto".
        strict: raise if something does not fit, apart from hooks; otherwise load what fits.
    """
    settings = describe_settings(trainer.config, identity.training)
    find = trainer.strategy.processes.call_on_main
    start = find(lambda: _find_start(trainer, identity, resume_from))
    if start is None:
        return None, settings
    saved = _load_checkpoint(trainer, start, strict=strict)
    settings, message = _compare_settings(saved.get("settings", {}), settings)
    if message is not None:
        log.warning("%s: %s", shorten_path(start), message)
    _check_end(trainer, start)
    return start, settings


def _check_end(trainer: Trainer, checkpoint: Path) -> None:
    """Warn if training has gone further than these settings say."""
    config, position, epochs = trainer.config, trainer.position, trainer.max_epochs
    ends = []
    if epochs is not None and (position.epoch, position.batches) > (epochs, 0):
        ends.append(f"max_epochs is {epochs}")
    if config.max_steps is not None and trainer.step > config.max_steps:
        ends.append(f"max_steps is {config.max_steps}")
    if ends:
        log.warning(
            "Nothing is left to train: the checkpoint %s was saved after step %d and %d "
            "epochs, and %s.",
            *(checkpoint, trainer.step, position.epoch, " and ".join(ends)),
        )


def _find_start(trainer: Trainer, identity: Identity, resume_from: Any) -> Path | None:
    """Return the checkpoint that training continues from; None to start a new run.

    "auto" is the newest unfinished run of the same training. If the newest checkpoint of a run is
    damaged, an older one is used.
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


def _load_checkpoint(trainer: Trainer, found: Path, *, strict: bool) -> Mapping[str, Any]:
    """Restore a trainer from a checkpoint, after comparing all of it; return the saved state."""
    model = trainer.model
    checkpoint = read_checkpoint(trainer, found)
    check_trainer_state(checkpoint)
    checkpoint = trainer.loop.state.restore_checkpoint(
        checkpoint,
        model,
        trainer.strategy.processes,
        what=f"this trainer and its {type(model).__name__}",
        advice="Resume with the model and the optimizers of the run, load what fits with "
        "fit(…, strict=False), or start a new run.",
        strict=strict,
        more=lambda: _other_settings(trainer, find_run_of_checkpoint(found)),
    )
    return checkpoint.state


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


def read_checkpoint(trainer: Trainer, path: Path) -> Checkpoint:
    """Return the contents of a checkpoint, in all of a trainer's processes, or raise in all.

    With sharded parameters, each process verifies the hashes of its own files, and reads its parts
    of the weights, of their averages and of the optimizers' states.
    """
    processes = trainer.strategy.processes
    if processes.size == 1:
        return load_checkpoint(path)
    checkpoint: Checkpoint | None = None
    error: CheckpointError | None = None
    try:
        if trainer.strategy.is_sharded:
            checkpoint = load_checkpoint(path, share=_own_share(trainer))
        else:
            checkpoint = load_checkpoint(path)
    except CheckpointError as raised:
        error = raised
    problems = processes.gather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"Rank {rank} could not read the checkpoint: {problem}")
    assert checkpoint is not None
    return checkpoint


def _own_share(trainer: Trainer) -> CheckpointShare:
    """Return which parts of a checkpoint this process reads."""
    processes, model = trainer.strategy.processes, trainer.model
    weights = {name: value for name, value in model.state_dict().items() if is_sharded(value)}
    plain_names = {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
    parameters = [parameters_of(optimizer) for optimizer in trainer.optimizers]

    def find_state(name: str) -> Tensor | None:
        if found := _OF_OPTIMIZER.fullmatch(name):
            optimizer, parameter = map(int, found.groups())
            several = parameters[optimizer] if optimizer < len(parameters) else []
            return several[parameter] if parameter < len(several) else None
        found = _AVERAGE.fullmatch(name)
        return None if found is None else plain_names.get(found[1])

    return CheckpointShare(processes.rank, processes.size, weights.get, find_state)


def describe_settings(config: TrainerConfig, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a checkpoint keeps, to be compared when it is resumed."""
    fields = {name: to_jsonable(getattr(config, name)) for name in (*_USED, "seed")}
    described: dict[str, Any] = {name: training.get(name, []) for name in _RESTORED[:2]}
    return {**fields, **described}


def _compare_settings(
    saved: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """Return the settings that a resumed run has, and a message about those that differ."""
    saved = to_jsonable(saved)  # a checkpoint may have anything there
    used = _list_changes(saved, now, _USED)
    unused = _list_changes(saved, now, _RESTORED)
    in_force = {**now, **{name: saved[name] for name in _RESTORED if name in saved}}
    if not used and not unused:
        return in_force, None
    parts = ["The settings differ from those that the checkpoint was saved with."]
    if used:
        parts.append(f"Used from now on: {'; '.join(used)}.")
    if unused:
        parts.append(f"Without effect, because the checkpoint's are restored: {'; '.join(unused)}.")
    parts.append(
        "To train on with other settings in a run of its own, use fit(fork_from=…), or "
        "`hookline train CONFIG --from RUN`."
    )
    return in_force, " ".join(parts)


def _list_changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, ...]
) -> list[str]:
    before = {name: saved[name] for name in names if name in saved}
    pairs = diff_configs(number_items(before), number_items({n: now.get(n) for n in before}))
    return [
        printable(f"{name} is {new!r} instead of {was!r}") for name, (was, new) in pairs.items()
    ]
