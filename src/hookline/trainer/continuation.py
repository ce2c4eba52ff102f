"""Starting from a checkpoint: a run that is continued, or a new one with other settings (a fork).

Each process reads what it needs of the checkpoint. All of it is compared before it is restored, and
settings that differ from those that it was saved with are reported. A fork changes the checkpoint's
state before: a hyperparameter is the new one, a changed schedule is stepped to the position, a new
seed gives new random states, and with other data the epoch starts again.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.arguments import show_value
from hookline.checkpoint import find_checkpoint
from hookline.checkpoint.catalog import read_manifest
from hookline.checkpoint.folder import Checkpoint, RankSelection, load_checkpoint
from hookline.config.trainer_config import TrainerConfig
from hookline.errors import CheckpointError
from hookline.hooks.checkpointing.model_checkpoint import SavingHook
from hookline.loop.event_context import parameters_of
from hookline.loop.random_state import random_state
from hookline.loop.saved_state import check_trainer_state, reported_damage
from hookline.printable import message_lines
from hookline.runs.diff import diff_configs, number_items
from hookline.runs.identity import Identity
from hookline.runs.jsonable import to_jsonable
from hookline.runs.location import find_run_of_checkpoint, shorten_path
from hookline.runs.manifest import read_run_manifest
from hookline.runs.restart import find_unfinished_run
from hookline.tensors.sharded import is_sharded
from hookline.trainer.checks import needs_metric

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

log = logging.getLogger("hookline")

_USED = (  # a resumed run uses the new value
    *("precision", "accumulate", "clip_norm", "clip_value", "on_nan", "loaders"),
    *("optimizer_every", "scheduler_every", "validate_every_epochs", "validate_every_steps"),
)
_RESTORED = ("optimizers", "schedulers", "seed")  # it uses the checkpoint's
_OF_OPTIMIZER = re.compile(r"\['optimizers'\]\[(\d+)\]\['state'\]\[(\d+)\]\[[^\[\]]*\]")
_AVERAGE = re.compile(r"\['hooks'\]\['[^']*'\]\['averages'\]\['([^']*)'\]")


def resume(
    trainer: Trainer, identity: Identity, resume_from: Any
) -> tuple[Path | None, dict[str, Any]]:
    """Restore a trainer from the checkpoint of the run that it continues, in all processes.

    Return the checkpoint, None if a new run starts, and the settings that the run then has. Raise
    if something does not fit, apart from hooks.
    """
    settings = describe_settings(trainer.config, identity.training)
    find = trainer.strategy.processes.call_on_main
    start = find(lambda: _find_start(trainer, identity, resume_from))
    if start is None:
        return None, settings
    loaded = read_checkpoint(trainer, start)
    advice = "Resume with the model and the optimizers of the run, or start a new run."
    _restore(trainer, loaded, advice)
    settings, message = _compare_settings(loaded.state.get("settings", {}), settings)
    if message is not None:
        log.warning("%s: %s", shorten_path(start), message)
    if ends := _find_reached_end(trainer, trainer.step, trainer.position.epoch):
        log.warning(
            "Nothing is left to train: the checkpoint %s was saved after step %d and %d epochs, "
            "and %s.",
            *(start, trainer.step, trainer.position.epoch, ends),
        )
    return start, settings


def _find_reached_end(trainer: Trainer, step: int, epoch: int) -> str:
    """Return which settings say that training ends here or has ended before; "" if none does."""
    ends = {
        "max_steps": (trainer.config.max_steps, step),
        "max_epochs": (trainer.max_epochs, epoch),
    }
    reached = [
        f"{name} is {end}" for name, (end, here) in ends.items() if end is not None and here >= end
    ]
    return " and ".join(reached)


def _find_start(trainer: Trainer, identity: Identity, resume_from: Any) -> Path | None:
    """Return the checkpoint that training continues from; None to start a new run.

    "auto" is the newest unfinished run of the same training. If the newest checkpoint of a run is
    damaged, an older one is used.
    """
    path, runs = os.fspath(resume_from), trainer.config.runs
    if path == "auto":
        if runs is None:
            return None
        found, message = find_unfinished_run(runs, identity.describe(trainer.hooks.describe()))
        trainer.announce(message)
        return found
    checkpoint = find_checkpoint(path, verify=True)
    folder = find_run_of_checkpoint(checkpoint)
    if folder is not None and runs is not None:
        read_run_manifest(folder)  # raises before anything is loaded, if it cannot be continued
    return checkpoint


def _restore(trainer: Trainer, checkpoint: Checkpoint, advice: str) -> None:
    """Restore a trainer from a checkpoint, after comparing all of it."""
    trainer.loop.state.restore_checkpoint(
        checkpoint,
        trainer.strategy.processes,
        what=f"this trainer and its {type(trainer.model).__name__}",
        advice=advice,
    )


def read_checkpoint(trainer: Trainer, path: Path) -> Checkpoint:
    """Return the contents of a checkpoint, in all of a trainer's processes, or raise in all.

    With sharded parameters, each process verifies the hashes of its own files, and reads its shards
    of the weights, of their averages and of the optimizers' states.
    """
    strategy = trainer.strategy
    options: Any = {}
    if strategy.is_sharded and strategy.is_distributed:
        options = {"selection": _own_selection(trainer)}
    checkpoint: Checkpoint | None = None
    error: CheckpointError | None = None
    try:
        checkpoint = load_checkpoint(path, **options)
        check_trainer_state(checkpoint)
    except CheckpointError as raised:
        error = raised
    problems = strategy.processes.gather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"Rank {rank} could not read the checkpoint: {problem}")
    assert checkpoint is not None
    return checkpoint


def _own_selection(trainer: Trainer) -> RankSelection:
    """Return which tensors of a checkpoint this process reads, and what of them."""
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

    return RankSelection(processes.rank, processes.size, weights.get, find_state)


def describe_settings(config: TrainerConfig, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a checkpoint keeps, to be compared when it is resumed."""
    fields = {name: to_jsonable(getattr(config, name)) for name in (*_USED, "seed")}
    described: dict[str, Any] = {name: training.get(name, []) for name in _RESTORED[:2]}
    return {**fields, **described, "data": training.get("loaders", {})}


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
    sentences = ["The settings differ from those that the checkpoint was saved with."]
    if used:
        sentences.append(f"Used from now on: {'; '.join(used)}.")
    if unused:
        sentences.append(
            f"Without effect, because the checkpoint's are restored: {'; '.join(unused)}."
        )
    sentences.append(
        "To train on with other settings in a run of its own, use fit(fork_from=…), or "
        "`hookline train CONFIG --from RUN`."
    )
    return in_force, " ".join(sentences)


def _list_changes(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    names: tuple[str, ...] = (*_USED, *_RESTORED),
) -> list[str]:
    """Return which of the saved settings differ from those now, one line each."""
    before = {name: saved[name] for name in names if name in saved}
    pairs = diff_configs(number_items(before), number_items({n: now.get(n) for n in before}))
    return [
        f"{name} is {show_value(new)} instead of {show_value(was)}"
        for name, (was, new) in pairs.items()
    ]


# -- forks -----------------------------------------------------------------------------------------


def describe_parent(checkpoint: Path) -> dict[str, Any]:
    """Return the run, the name and the step of a checkpoint, for the manifest of a fork."""
    info = read_manifest(checkpoint)["info"]
    return {
        "run_id": info.get("run_id"),
        "checkpoint": checkpoint.name,
        "step": info.get("step"),
    }


def fork(trainer: Trainer, path: Any) -> tuple[Path, dict[str, Any]]:
    """Restore a trainer from a checkpoint, or a run's newest, apart from changed settings.

    Return the checkpoint, and the field `parent` of the new run's manifest. One message lists the
    settings that were changed.
    """
    found = trainer.strategy.processes.call_on_main(lambda: find_checkpoint(path))
    checkpoint = read_checkpoint(trainer, found)
    state = checkpoint.state
    with reported_damage(checkpoint):
        if ends := _find_reached_end(trainer, state["step"], state["position"]["epoch"]):
            raise CheckpointError(
                f"Nothing is left to train: the checkpoint {found} was saved after step "
                f"{state['step']} and {state['position']['epoch']} epochs, and {ends}. Set a "
                "larger number."
            )
        before = to_jsonable(state.get("settings") or {})
        _apply_settings(trainer, state, before)
    _restore(trainer, checkpoint, "Fork with the model and the optimizers of the run.")
    for name in trainer.hooks.list_hooks():
        hook = trainer.hooks.get_hook(name)
        if isinstance(hook, SavingHook):
            hook.forget_resumed()  # the parent's checkpoints are not the fork's to remove
    parent = describe_parent(found)
    run = "" if parent["run_id"] is None else f" of the run {parent['run_id']}"
    text = f"Starting from {parent['checkpoint']}{run}, after step {parent['step']}."
    changes = _list_changes(before, trainer.compared_settings)
    trainer.announce(message_lines(f"{text} New settings:", *changes) if changes else text)
    return found, parent


def _apply_settings(trainer: Trainer, state: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Write the trainer's settings into a checkpoint's state where they differ from those before.

    A checkpoint of an older version has no settings: then all are written.
    """
    now = trainer.compared_settings
    saved_schedulers = list(state["schedulers"])
    state["schedulers"] = [scheduler.state_dict() for scheduler in trainer.schedulers]
    state.get("classes", {})["schedulers"] = [type(s).__name__ for s in trainer.schedulers]
    for idx in range(min(len(trainer.optimizers), len(state["optimizers"]))):
        _apply_optimizer_settings(trainer, idx, state, saved_schedulers, before)
    has_other_data = bool(_list_changes(before, now, ("data", "loaders")))
    for own in (state, *(state.get("ranks") or ())):
        own["position"] = position = dict(own["position"])
        if before.get("seed") != now["seed"]:
            position["now"] = random_state(trainer.device)  # `fit` has used the new seed
        if has_other_data:
            position.update(batches=0, loaders=[], generators=[], validated={})
    if has_other_data:
        log.warning(
            "The data to train on is not that of the checkpoint: epoch %d starts again, with the "
            "new data.",
            state["position"]["epoch"],
        )
        state.update(validation_due=False, epoch_started=False, epoch_over=False)
    state["disabled"] = []  # hooks are enabled as in the new settings
    state["run"] = None  # the metrics are the parent's


def _apply_optimizer_settings(
    trainer: Trainer,
    idx: int,
    state: Mapping[str, Any],
    saved_schedulers: Sequence[dict[str, Any]],
    before: Mapping[str, Any],
) -> None:
    """Write the changed settings of an optimizer and its schedulers into a checkpoint's state."""
    groups = trainer.optimizers[idx].param_groups
    known = [one["groups"] for one in before.get("optimizers", ())][idx : idx + 1]
    groups_before = known[0] if known else [{} for _ in groups]
    groups_now = trainer.compared_settings["optimizers"][idx]["groups"]
    changed = [
        {name for name, value in group.items() if was.get(name) != value}
        for was, group in zip(groups_before, groups_now, strict=False)
    ]
    described = zip(before.get("schedulers", ()), saved_schedulers, strict=False)
    parents = [pair for pair in described if pair[0].get("optimizer", 0) == idx]
    has_other_lr = any(names & {"lr", "max_lr"} for names in changed)
    has_other_unit = before.get("scheduler_every") != trainer.config.scheduler_every
    unstepped = [dict(group) for group in groups]
    is_stepped = _apply_schedule(
        trainer, idx, state, parents, is_changed=has_other_lr or has_other_unit
    )
    saved_groups = state["optimizers"][idx]["param_groups"]
    for names, was, group, saved in zip(changed, unstepped, groups, saved_groups, strict=False):
        if is_stepped:  # only what the schedule sets: groups may have counters, or a hook's values
            names |= {"lr", "initial_lr"} | {n for n in group if group[n] is not was.get(n)}
        saved |= {name: group[name] for name in names & group.keys() - {"params"}}


def _apply_schedule(
    trainer: Trainer,
    idx: int,
    state: Mapping[str, Any],
    parents: Sequence[tuple[Any, dict[str, Any]]],
    *,
    is_changed: bool,
) -> bool:
    """Write the states of an optimizer's schedulers; return whether they were stepped.

    `parents` are the settings and states of the parent's schedulers.
    """
    optimizer, now = trainer.optimizers[idx], trainer.compared_settings["schedulers"]
    own = {n: s for n, s in enumerate(trainer.schedulers) if s.optimizer is optimizer}
    settings = [now[number] for number in own]
    is_changed |= [was for was, _ in parents] != settings
    is_same_kind = [was["class"] for was, _ in parents] == [one["class"] for one in settings]
    if is_same_kind and (not own or not is_changed or any(map(needs_metric, own.values()))):
        for (number, scheduler), (was, saved) in zip(own.items(), parents, strict=True):
            new = {name for name, value in now[number].items() if was.get(name) != value}
            changes = {name: value for name, value in vars(scheduler).items() if name in new}
            state["schedulers"][number] = saved | changes
        return False
    every = trainer.config.optimizer_every
    position = state["step"] if every is None else state["step"] // every[idx]
    if trainer.config.scheduler_every == "epoch":
        position = state["position"]["epoch"]
    _step_to(list(own.values()), position)
    for number, scheduler in own.items():
        state["schedulers"][number] = scheduler.state_dict()
    return True


def _step_to(schedulers: Sequence[Any], position: int) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not stepped yet
            for _ in range(position):
                for scheduler in schedulers:
                    if not needs_metric(scheduler):
                        scheduler.step()
    except Exception as error:  # a scheduler may raise anything
        raise CheckpointError(f"The schedule cannot be stepped to {position}: {error}") from error
