"""Optimizers and schedulers of a fork: a checkpoint's state with the settings that were changed.

The settings that the parent began with are compared with those of the new optimizers and
schedulers. Where they differ, the new value replaces the one in the checkpoint's state:

- A hyperparameter of an optimizer's group is replaced, such as `weight_decay`.
- If the learning rate or an argument of a scheduler differs, the new scheduler is stepped to the
  position of the parent's, and the learning rate is the one it then has. A schedule that was made
  longer therefore continues where the longer one would be, also after the end of the shorter one.
- `ReduceLROnPlateau` depends on metrics and cannot be stepped again: the learning rate that it has
  reached is multiplied by the ratio of the new and the old one.
- An optimizer whose schedulers are of other classes gets the new ones from their beginning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from hookline.runs.formatting import format_number
from hookline.runs.jsonable import to_jsonable
from hookline.trainer.checks import needs_metric

__all__ = ["apply_optimizer_settings", "describe_saved_optimizers"]

_NOT_OPTIONS = ("params", "param_names", "parameters")


def describe_saved_optimizers(state: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of a checkpoint's optimizers and schedulers, without classes.

    It is used where the parent's manifest is missing, and has what can be compared with `now`, the
    description of the new ones.
    """
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


def apply_optimizer_settings(
    trainer: Any, state: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Replace what differs in a checkpoint's state; return the changes, and what is impossible.

    Args:
        trainer: The new trainer; its optimizers and schedulers have not been used.
        state: The checkpoint's state, with as many optimizers and groups as the trainer has.
        before: What the parent consisted of, as from `describe_training`.
        now: The same of the new trainer.
    """
    changes: list[str] = []
    problems: list[str] = []
    saved_schedulers = list(state["schedulers"])
    state["schedulers"] = [scheduler.state_dict() for scheduler in trainer.schedulers]
    for i, optimizer in enumerate(trainer.optimizers):
        schedule = _Schedule(trainer, i, saved_schedulers, before, now)
        label = f"optimizer {i} ({type(optimizer).__name__})"
        described = before["optimizers"][i]["groups"], now["optimizers"][i]["groups"]
        changed = [
            {n: was.get(n) for n, value in group.items() if _differs(n, was, value)}
            for was, group in zip(*described, strict=True)
        ]
        changes += [
            f"{label}, group {j}: {name} is {_show(described[1][j][name])} instead of {_show(was)}"
            for j, names in enumerate(changed)
            for name, was in names.items()
        ]
        changes += [f"{label}: {text}" for text in schedule.changes()]
        lr_differs = any("lr" in names or "max_lr" in names for names in changed)
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
            stepped = [*schedule.stepped_options(j), "lr", "initial_lr"]
            new = {*names, *(stepped if reached == "stepped" else ())}
            saved |= {name: group[name] for name in group if name in new or name not in saved}
    return changes, problems


def _differs(name: str, was: Mapping[str, Any], value: Any) -> bool:
    return name not in _NOT_OPTIONS and was.get(name) != value


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
        self._optimizer = trainer.optimizers[idx]
        self._numbers = [
            n for n, s in enumerate(trainer.schedulers) if s.optimizer is self._optimizer
        ]
        self._schedulers = [trainer.schedulers[n] for n in self._numbers]
        self._now = [now["schedulers"][n] for n in self._numbers]
        described = before.get("schedulers", ())
        pairs = [pair for pair in zip(described, saved, strict=False) if _drives(pair[0], idx)]
        self._before = [description for description, _ in pairs]
        self._saved = [own for _, own in pairs]
        self._options = [dict(group) for group in self._optimizer.param_groups]

    @property
    def _is_replaced(self) -> bool:
        return [_classes(one) for one in self._before] != [_classes(one) for one in self._now]

    def changes(self) -> list[str]:
        """Return what differs, one line each."""
        if self._is_replaced:
            was = ", ".join(_short(one["class"]) for one in self._before) or "no scheduler"
            new = ", ".join(_short(one["class"]) for one in self._now) or "no scheduler"
            begins = ", from its beginning" if self._now else ""
            return [f"{new} instead of {was}{begins}, with the lr of the new settings"]
        return [
            f"{_short(new['class'])}: {name} is {_show(value)} instead of {_show(was.get(name))}"
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
        driven_by_metric = [needs_metric(scheduler) for scheduler in self._schedulers]
        if not lr_differs and self._before == self._now:
            how = "saved"
        elif all(driven_by_metric):
            how = "plateau" if self._schedulers else "saved"
        elif any(driven_by_metric):
            raise ValueError(
                "it has ReduceLROnPlateau beside another scheduler, so the learning rate that "
                "changed settings lead to is unknown. Keep its lr and the schedulers' arguments."
            )
        else:
            self._step_to_position()
            return self._put(states, [one.state_dict() for one in self._schedulers], "stepped")
        for was, new, saved, scheduler in zip(
            self._before, self._now, self._saved, self._schedulers, strict=True
        ):
            names = [name for name, value in new.items() if was.get(name) != value]
            saved.update({name: vars(scheduler)[name] for name in names})
        return self._put(states, self._saved, how)

    def _put(self, states: list[Any], own: list[Any], how: str) -> str:
        for number, state in zip(self._numbers, own, strict=True):
            states[number] = state
        return how

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

    def stepped_options(self, group: int) -> list[str]:
        """Return the options of a group that stepping has changed, such as `lr` and `betas`."""
        options = self._options[group]
        now = self._optimizer.param_groups[group]
        return [n for n, value in now.items() if n != "params" and options.get(n) != value]


def _drives(description: Mapping[str, Any], idx: int) -> bool:
    return bool(description.get("optimizer", 0) == idx)


def _classes(description: Mapping[str, Any]) -> list[Any]:
    """Return the class of a scheduler, and of those that it consists of."""
    return [description["class"], *(_classes(one) for one in description.get("schedulers", ()))]


def _short(path: str) -> str:
    return path.rpartition(".")[2]
