"""Forking: a new run that starts from a checkpoint of another run, with changed settings.

Everything in the checkpoint is restored, as when a run is resumed. Where a setting differs from the
one that the parent began with, the new one is used:

| changed | in the fork |
|---|---|
| a hyperparameter of an optimizer's group | the new value replaces the checkpoint's |
| the learning rate, or an argument of a scheduler | the new scheduler is stepped to the position |
| the same with `ReduceLROnPlateau`, which depends on metrics | the reached rate, times new / old |
| the classes of schedulers | the new ones, from their beginning |
| seed | the random states are those of the new seed |
| training data, or how loaders are mixed | the epoch restarts, with a warning |
| enabled or disabled hooks | as in the new settings |
| all other fields of the configuration | they are those of the new trainer |

A schedule that was made longer therefore continues where the longer one would be, also after the
end of the shorter one. Another model, or optimizers of another class, raise an error that lists all
differences.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.arguments import show_value
from hookline.checkpoint import find_checkpoint
from hookline.checkpoint.checkpoint_lookup import read_manifest
from hookline.errors import CheckpointError
from hookline.hooks.checkpointing.checkpoint_hook import SavingHook
from hookline.loop.random_state import random_state
from hookline.loop.saved_state import check_trainer_state, reported_damage
from hookline.masking import mask_secrets
from hookline.printable import message_lines
from hookline.runs.checkpoint_reader import describe_mismatches
from hookline.runs.diff import diff_configs
from hookline.runs.formatting import format_number
from hookline.runs.jsonable import to_jsonable
from hookline.runs.run_lookup import find_run_of_checkpoint
from hookline.runs.run_reader import OpenedRun
from hookline.trainer.checks import needs_metric
from hookline.trainer.continuation import read_checkpoint
from hookline.trainer.data_position import DataPosition

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

__all__ = ["describe_parent", "load_fork"]

log = logging.getLogger("hookline")

_REPORTED_APART = ("optimizer", "scheduler", "data", "hooks")  # sections of a config file
_WITHOUT_EFFECT = ("runs", "progress")
_NOT_OPTIONS = ("params", "param_names", "parameters")


def describe_parent(checkpoint: Path) -> dict[str, Any]:
    """Return the run, the name and the step of a checkpoint, for the manifest of a fork."""
    info = read_manifest(checkpoint)["info"]
    return {
        "run_id": info.get("run_id"),
        "checkpoint": checkpoint.name,
        "step": info.get("step"),
    }


def load_fork(
    trainer: Trainer, path: Any, training: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Restore a trainer from a checkpoint, or a run's newest, apart from changed settings.

    Return the checkpoint, and the field `parent` of the new run's manifest. One message lists the
    settings that were changed. If something does not fit, nothing is restored.
    """
    processes, model = trainer.strategy.processes, trainer.model
    found = processes.call_on_main(lambda: find_checkpoint(Path(path)))
    checkpoint = read_checkpoint(trainer, found)
    folder = find_run_of_checkpoint(found)
    manifest = {} if folder is None else OpenedRun(folder).manifest
    check_trainer_state(checkpoint)
    with reported_damage(checkpoint):
        trainer.loop.state.adapt(checkpoint.state, processes)
        fork = _Fork(trainer, checkpoint.state, manifest, training)
        problems = fork.find_differences(checkpoint.model) or fork.apply_settings()
        problems = problems or _describe_unloadable(trainer, fork.state)
        if problems:
            head = f"The checkpoint {found} cannot be continued with these settings:"
            raise CheckpointError(message_lines(head, *problems))
    trainer.loop.state.load(checkpoint, fork.state, model)
    for name in trainer.hooks.list_hooks():
        hook = trainer.hooks.get_hook(name)
        if isinstance(hook, SavingHook):
            hook.forget_resumed()  # the parent's checkpoints are not the fork's to remove
    parent = describe_parent(found)
    trainer.announce(fork.message(parent))
    return found, parent


def _describe_unloadable(trainer: Trainer, state: Mapping[str, Any]) -> list[str]:
    """Return what the objects of a trainer cannot load of a state, one line each."""
    found, problems = trainer.loop.state.compare(state, trainer.model)
    return [line for several in found.values() for line in several] or problems


class _Fork:
    """A checkpoint's state, into which changed settings are written before it is loaded."""

    def __init__(
        self,
        trainer: Trainer,
        state: dict[str, Any],
        manifest: Mapping[str, Any],
        training: Mapping[str, Any],
    ) -> None:
        self.state: dict[str, Any] = {**state, "run": None}  # the metrics are the parent's
        self._trainer = trainer
        self._manifest = manifest
        self._now = training
        first = (manifest.get("parts") or [{}])[0]  # it has what later parts have changed
        before = first.get("training") or manifest.get("training")
        self._before: Mapping[str, Any] = before or _describe_saved_optimizers(
            self.state, self._now
        )
        self._changes: list[str] = []

    def find_differences(self, weights: Mapping[str, Any]) -> list[str]:
        """Return why this trainer cannot continue the checkpoint, one line each."""
        trainer, before, now = self._trainer, self._before, self._now
        was, new = (_class_of(one.get("model", {})) for one in (before, now))
        lines = [] if was in (new, None) else [f"the model is a {new}; the parent's is a {was}"]
        lines += describe_mismatches(weights, trainer.model.state_dict())
        saved, here = self.state["optimizers"], trainer.optimizers
        if len(saved) != len(here):
            return [*lines, f"the checkpoint has {len(saved)} optimizers, this trainer {len(here)}"]
        for i, (optimizer, own) in enumerate(zip(here, saved, strict=True)):
            was, new = (_class_of(one["optimizers"][i]) for one in (before, now))
            if was not in (new, None):
                lines.append(f"optimizer {i} is a {new}; the parent's is a {was}")
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            sizes_before = [len(group["params"]) for group in own["param_groups"]]
            if sizes != sizes_before:
                lines.append(
                    f"optimizer {i} has groups of {sizes} parameters; the parent's {sizes_before}"
                )
        return lines

    def apply_settings(self) -> list[str]:
        """Write what differs into the state; return what cannot be applied, one line each."""
        trainer, state = self._trainer, self.state
        config = mask_secrets(to_jsonable(trainer.config.model_dump(mode="json")))
        differing = diff_configs(*_comparable(self._manifest.get("config"), config))
        problems = self._find_end(state)
        schedule = next((n for n in differing if n.endswith("scheduler_every")), None)
        if schedule is not None and trainer.schedulers:
            was, new = differing[schedule]
            problems.append(
                f"{schedule} is {show_value(new)} instead of {show_value(was)}: the position of "
                "the schedulers counts "
                f"{was}s. Keep {schedule}={was}."
            )
        changes, impossible = _apply_optimizer_settings(trainer, state, self._before, self._now)
        self._changes += changes
        self._changes += [
            f"{name} is {show_value(new)} instead of {show_value(was)}"
            for name, (was, new) in differing.items()
            if name.partition(".")[0] not in _REPORTED_APART
        ]
        if any(name.rpartition(".")[2] == "seed" for name in differing):
            state["position"]["now"] = random_state(trainer.device)  # `fit` has used the new seed
        self._apply_data(differing)
        self._apply_hooks()
        return problems + impossible

    def _find_end(self, state: Mapping[str, Any]) -> list[str]:
        """Return a line if the checkpoint is at the end that the settings ask for."""
        config, epochs = self._trainer.config, self._trainer.max_epochs
        ends = [("max_steps", config.max_steps, state["step"], "step")]
        ends.append(("max_epochs", epochs, state["position"]["epoch"], "epoch"))
        return [
            f"nothing is left to train: the checkpoint is at {unit} {reached} and {name} is {end}. "
            f"Set a larger {name}"
            for name, end, reached, unit in ends
            if end is not None and reached >= end
        ]

    def _apply_data(self, differing: Mapping[str, list[Any]]) -> None:
        """Restart the epoch if the data to train on is not the parent's."""
        position = self.state["position"]
        was, new = (one.get("loaders") for one in (self._before, self._now))
        is_other = was is not None and was != new
        for name in differing:
            is_other |= name.startswith(("data.train", "trainer.loaders", "loaders"))
        stream, saved = self._trainer.train_data, position["loaders"]
        loaders = 0 if stream is None else len(stream.loaders)
        if not is_other and (saved if isinstance(saved, int) else len(saved)) in (0, loaders):
            return
        if position["batches"]:
            log.warning(
                "The data to train on is not that of the checkpoint, so the position after %d "
                "batches of epoch %d cannot be used: the epoch starts again, with the new data.",
                position["batches"],
                position["epoch"],
            )
        self._changes.append(f"the data to train on, from the start of epoch {position['epoch']}")
        new_position = DataPosition()
        new_position.epoch = position["epoch"]
        fresh = new_position.state_dict(self._trainer.device)
        self.state["position"] = {**fresh, "now": position["now"], "validated": {}}
        flags = {"validation_due", "epoch_started", "epoch_over"}
        self.state |= dict.fromkeys(self.state.keys() & flags, False)

    def _apply_hooks(self) -> None:
        """Leave hooks enabled that the parent began without, and report options that differ."""
        before = {hook["name"]: hook for hook in self._manifest.get("hooks") or ()}
        for info in self._trainer.hooks.describe():
            hook = before.get(info.name)
            if hook is None:
                continue
            if info.enabled and not hook.get("enabled", True):
                self.state["disabled"] = [n for n in self.state["disabled"] if n != info.name]
            options = mask_secrets(to_jsonable(dict(info.options)))
            pairs = {
                "enabled": (hook.get("enabled"), info.enabled),
                "schedule": (hook.get("schedule"), info.schedule),
                **diff_configs(hook.get("options") or {}, options),
            }
            self._changes += [
                f"hook {info.name}: {name} is {show_value(new)} instead of {show_value(was)}"
                for name, (was, new) in pairs.items()
                if was != new
            ]

    def message(self, parent: Mapping[str, Any]) -> str:
        """Return what the fork starts from, and which settings are new."""
        run = "" if parent["run_id"] is None else f" of the run {parent['run_id']}"
        text = f"Starting from {parent['checkpoint']}{run}, after step {parent['step']}."
        if not self._manifest:
            text += (
                " The run of the checkpoint is not there, so the new settings were compared with "
                "the values in the checkpoint."
            )
        if not self._changes:
            return f"{text} No setting was changed."
        return message_lines(f"{text} New settings:", *self._changes)


def _comparable(before: Any, now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two configurations with the fields that affect training and that both can have."""
    if not isinstance(before, dict):
        return {}, {}
    pair = []
    for config in (before, now):
        fields = config.get("trainer", config)
        trainer = {k: v for k, v in fields.items() if k not in _WITHOUT_EFFECT}
        is_file = "trainer" in before and "trainer" in now
        pair.append({**config, "trainer": trainer} if is_file else trainer)
    return pair[0], pair[1]


def _class_of(description: Mapping[str, Any]) -> str | None:
    """Return the name of a class without its module, which differs if a file was moved."""
    path = description.get("class")
    return None if path is None else str(path).rpartition(".")[2]


# -- optimizers and schedulers --------------------------------------------------------------------


def _describe_saved_optimizers(state: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint has of `now`, for a parent whose manifest is missing."""
    optimizers: list[Any] = []
    for saved in state["optimizers"]:
        groups = [
            {**group, "lr": group.get("initial_lr", group.get("lr"))}
            for group in saved["param_groups"]
        ]
        optimizers.append({"groups": to_jsonable(groups)})
    schedulers = [
        {name: to_jsonable(saved.get(name, value)) for name, value in described.items()}
        for described, saved in zip(now.get("schedulers", ()), state["schedulers"], strict=False)
    ]
    return {"optimizers": optimizers, "schedulers": schedulers}


def _apply_optimizer_settings(
    trainer: Any, state: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Replace what differs in a checkpoint's state; return the changes, and what is impossible."""
    changes: list[str] = []
    problems: list[str] = []
    saved_schedulers = list(state["schedulers"])
    state["schedulers"] = [scheduler.state_dict() for scheduler in trainer.schedulers]
    for i, optimizer in enumerate(trainer.optimizers):
        schedule = _Schedule(trainer, i, saved_schedulers, before, now)
        label = f"optimizer {i} ({type(optimizer).__name__})"
        described = before["optimizers"][i]["groups"], now["optimizers"][i]["groups"]
        changed = [
            {n: was.get(n) for n, v in group.items() if n not in _NOT_OPTIONS and was.get(n) != v}
            for was, group in zip(*described, strict=True)
        ]
        changes += [
            f"{label}, group {j}: {name} is {_show(described[1][j][name])} instead of {_show(was)}"
            for j, names in enumerate(changed)
            for name, was in names.items()
        ]
        changes += [f"{label}: {text}" for text in schedule.changes()]
        lr_differs = any("lr" in names or "max_lr" in names for names in changed)
        before_steps = [dict(group) for group in optimizer.param_groups]
        try:
            reached = schedule.restore(state["schedulers"], lr_differs)
        except Exception as error:  # a scheduler may raise anything
            problems.append(f"{label}: {error}")
            continue
        for j, names in enumerate(changed):
            group, saved = optimizer.param_groups[j], state["optimizers"][i]["param_groups"][j]
            if reached == "plateau" and names.get("lr"):
                saved["lr"] = saved["lr"] * (float(group["lr"]) / names.pop("lr"))
            if reached == "replaced":
                saved.pop("initial_lr", None)
                saved |= {n: v for n, v in group.items() if n in ("lr", "initial_lr")}
            if reached == "stepped" and saved["lr"] != group["lr"]:
                at = f"{_show(to_jsonable(group['lr']))} instead of {_show(saved['lr'])}"
                changes.append(f"{label}, group {j}: the schedule is at lr {at}")
            new = set(names)
            if reached == "stepped":  # also what the scheduler has changed, such as `betas`
                new |= {n for n in group if n != "params" and before_steps[j].get(n) != group[n]}
                new |= {"lr", "initial_lr"}
            saved |= {name: group[name] for name in group if name in new or name not in saved}
    return changes, problems


def _show(value: Any) -> str:
    return format_number(value) if type(value) is float else str(value)


class _Schedule:
    """The schedulers of one optimizer, before and now."""

    def __init__(
        self,
        trainer: Any,
        idx: int,
        saved: list[Any],
        before: Mapping[str, Any],
        now: Mapping[str, Any],
    ) -> None:
        optimizer = trainer.optimizers[idx]
        self._numbers = [n for n, s in enumerate(trainer.schedulers) if s.optimizer is optimizer]
        self._schedulers = [trainer.schedulers[n] for n in self._numbers]
        self._now = [now["schedulers"][n] for n in self._numbers]
        described = zip(before.get("schedulers", ()), saved, strict=False)
        pairs = [pair for pair in described if pair[0].get("optimizer", 0) == idx]
        self._before = [description for description, _ in pairs]
        self._saved = [own for _, own in pairs]
        self._is_replaced = [*map(_classes, self._before)] != [*map(_classes, self._now)]

    def changes(self) -> list[str]:
        """Return what differs, one line each."""
        if self._is_replaced:
            was = ", ".join(str(_class_of(one)) for one in self._before) or "no scheduler"
            new = ", ".join(str(_class_of(one)) for one in self._now) or "no scheduler"
            begins = ", from its beginning" if self._now else ""
            return [f"{new} instead of {was}{begins}, with the lr of the new settings"]
        return [
            f"{_class_of(new)}: {name} is {_show(value)} instead of {_show(was.get(name))}"
            for was, new in zip(self._before, self._now, strict=True)
            for name, value in new.items()
            if was.get(name) != value
        ]

    def restore(self, states: list[Any], lr_differs: bool) -> str:
        """Put the state of each scheduler into the list of all; return how it was reached.

        "saved": as in the checkpoint. "stepped": stepped to the position of the parent's.
        "plateau": as in the checkpoint, with changed arguments. "replaced": new.
        """
        if self._is_replaced:
            return "replaced"
        by_metric = [needs_metric(scheduler) for scheduler in self._schedulers]
        is_changed = lr_differs or self._before != self._now
        if is_changed and any(by_metric) and not all(by_metric):
            raise ValueError(
                "it has ReduceLROnPlateau beside another scheduler, so the learning rate that "
                "changed settings lead to is unknown. Keep its lr and the schedulers' arguments."
            )
        if is_changed and self._schedulers and not any(by_metric):
            self._step_to_position()
            reached, own = "stepped", [scheduler.state_dict() for scheduler in self._schedulers]
        else:
            reached = "plateau" if is_changed and self._schedulers else "saved"
            own = [
                saved | {n: vars(scheduler)[n] for n, v in new.items() if was.get(n) != v}
                for was, new, saved, scheduler in zip(
                    self._before, self._now, self._saved, self._schedulers, strict=True
                )
            ]
        for number, state in zip(self._numbers, own, strict=True):
            states[number] = state
        return reached

    def _step_to_position(self) -> None:
        """Step the new schedulers as often as the parent's, in the same order."""
        positions = [saved.get("last_epoch") for saved in self._saved]
        for scheduler, position in zip(self._schedulers, positions, strict=True):
            if not isinstance(position, int) or not hasattr(scheduler, "last_epoch"):
                raise ValueError(
                    f"{type(scheduler).__name__} does not save its position as `last_epoch`, so "
                    "it cannot continue with changed settings. Keep its lr and arguments."
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not stepped yet
            while behind := [
                scheduler
                for scheduler, position in zip(self._schedulers, positions, strict=True)
                if scheduler.last_epoch < position
            ]:
                for scheduler in behind:
                    scheduler.step()


def _classes(description: Mapping[str, Any]) -> list[Any]:
    """Return the class of a scheduler, and of those that it consists of."""
    return [description["class"], *(_classes(one) for one in description.get("schedulers", ()))]
