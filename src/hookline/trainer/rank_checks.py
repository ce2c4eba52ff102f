"""Checks that all processes train in the same way, and that a hook of some does not wait for all.

Processes with different hooks, settings, optimizers or loaders would wait for each other for ever,
or train different models.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from hookline.config.trainer_config import TrainerConfig
from hookline.dispatch.calling_hook import find_limited_hook
from hookline.errors import CollectiveError, TrainingError
from hookline.printable import printable
from hookline.runs.diff import diff_configs, number_items
from hookline.runs.jsonable import canonical_json, to_jsonable

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

__all__ = ["check_same_training", "require_all_processes"]

_OWN = ("device", "seed", "runs", "progress", "debug", "hooks", "slow_rank_seconds")
_SHOWN = 3


def check_same_training(trainer: Trainer) -> None:
    """Raise, in all processes, if they are about to train in different ways.

    All processes have to call this.

    Raises:
        TrainingError: the hooks, settings, parameters, optimizers or loaders differ.
    """
    processes = trainer.strategy.processes
    own = {part: to_jsonable(value) for part, value in _describe(trainer).items()}
    digests = processes.gather({part: _digest(value) for part, value in own.items()})
    for part in own:
        other = next((r for r, one in enumerate(digests) if one[part] != digests[0][part]), None)
        if other is not None:
            values = processes.gather(number_items(own[part]))
            raise TrainingError(_explain(part, other, values[0], values[other]))


def require_all_processes(trainer: Trainer, function: str, *, unless: bool = False) -> None:
    """Raise if a hook that is not called in all processes calls what all of them have to call.

    Args:
        trainer: the trainer.
        function: what the hook calls.
        unless: whether one process is enough.

    Raises:
        CollectiveError: it does.
    """
    hook = find_limited_hook()
    if hook is not None and not unless and not trainer.strategy.alone:
        raise CollectiveError(
            f"{function} was called in the hook '{hook.name}', which is not called in all "
            f"processes (ranks='{hook.ranks}'). All of them have to call it, so it would wait for "
            f"ever. Register the hook with ranks='all', and use the result in one process."
        )


def _describe(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return what has to be the same in all processes, each part by its name in the message."""
    config, names = trainer.config, set(TrainerConfig.model_fields) - set(_OWN)
    streams = {"training loaders": trainer.train_data, "validation loaders": trainer.val_data}
    return {
        "hooks": {
            info.name: f"{info.cls.rpartition('.')[2]}, {info.schedule}, {info.status}"
            for info in trainer.hooks.describe()
        },
        "settings": {name: getattr(config, name) for name in sorted(names)},
        "parameters": {
            name: "lazy" if is_lazy(parameter) else [str(parameter.dtype), *parameter.shape]
            for name, parameter in trainer.model.named_parameters()
        },
        "optimizers": {
            **{f"optimizer {i}": _describe_optimizer(o) for i, o in enumerate(trainer.optimizers)},
            "schedulers": [type(scheduler).__name__ for scheduler in trainer.schedulers],
        },
        "loaders": {what: [] if s is None else list(s.names) for what, s in streams.items()},
    }


def _describe_optimizer(optimizer: Any) -> dict[str, Any]:
    groups = [
        {
            **{
                name: value
                for name, value in group.items()
                if isinstance(value, bool | int | float)
            },
            "parameters": len(group["params"]),
        }
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def _explain(part: str, rank: int, main: dict[str, Any], other: dict[str, Any]) -> str:
    pairs = diff_configs(main, other)
    shown = [
        f"{name}: {_show(of_main)} in rank 0, {_show(of_other)} in rank {rank}"
        for name, (of_main, of_other) in list(pairs.items())[:_SHOWN]
    ] or ["the order"]
    more = [f"and {len(pairs) - _SHOWN} more"] if len(pairs) > _SHOWN else []
    advice = (
        "Register the same hooks in all processes: `ranks='main'` of a hook says that it is called "
        "in rank 0 only."
        if part == "hooks"
        else "Give all processes the same: they would wait for each other, or train different "
        "models."
    )
    return printable(
        f"The {part} of the processes differ ({'; '.join([*shown, *more])}). {advice}", 2000
    )


def _show(value: Any) -> str:
    return "missing" if value is None else str(value)
