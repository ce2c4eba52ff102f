"""Checks before training: the arguments of a trainer and of `fit`, and that all ranks agree.

Processes with different hooks, settings, optimizers or loaders would wait for each other for ever,
or train different models.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.parameter import is_lazy

from hookline.arguments import (
    check_function,
    check_instance,
    check_mapping,
    read_attribute,
    read_items,
    show_value,
)
from hookline.config.trainer_config import HooksConfig, TrainerConfig
from hookline.dispatch.binding import bind
from hookline.dispatch.calling_hook import find_limited_hook
from hookline.errors import ArgumentError, CollectiveError, TrainingError
from hookline.hooks.metric_lookup import RequiresMetrics
from hookline.loop.event_context import device_of
from hookline.loop.model_watch import check_supported
from hookline.options import BuiltIn
from hookline.runs.diff import diff_configs, number_items
from hookline.runs.jsonable import to_jsonable
from hookline.text_tables import join_some

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

log = logging.getLogger("hookline")
_OWN = ("device", "seed", "runs", "progress", "debug", "hooks")  # of a rank
_SHOWN = 3  # differences between ranks
_CALLED_WITH = {
    "loss_fn": ("outputs", "targets"),
    "step_fn": ("model", "batch"),
    "tokens_fn": ("batch",),
}


def check_functions(**functions: Any) -> None:
    """Raise for what is not a function of the arguments that a trainer calls it with."""
    for name, function in functions.items():
        if isinstance(function, type):
            raise ArgumentError(f"{name} is the class {function.__name__}; expected an instance.")
        if function is not None:
            check_function(name, function, *_CALLED_WITH[name])


class MissingMetricError(TrainingError):
    """A hook needs a metric of the validation, and there is none."""

    def __init__(self, message: str, *, hook: str) -> None:
        super().__init__(message)
        self.hook = hook


def check_metrics(trainer: Any) -> None:
    """Raise if a hook or scheduler needs a metric of the validation, and there is none."""
    config = trainer.config
    missing = "there is no validation data: give val_loaders to fit(), or data.val in a config file"
    if trainer.validates:
        if (config.validate_every_epochs, config.validate_every_steps) != (None, None):
            return
        missing = "validate_every_epochs and validate_every_steps are None: set one of them"
    for name, hook, active in trainer.hooks.of_kind("loop"):
        if not active or not isinstance(hook, RequiresMetrics):
            continue
        event, needed = hook.required_metrics(trainer)
        if event != "on_validation_end":
            may_come = users_add_metrics(trainer.hooks)
            needed = [n for n in needed if n.startswith(("val/", "eval/")) and not may_come]
        if needed:
            raise MissingMetricError(
                f"The hook '{name}' ({type(hook).__name__}) needs the metric '{needed[0]}' of the "
                f"validation, but {missing}. To read training metrics, set its option "
                "check_on_train_epoch_end or save_on_train_epoch_end.",
                hook=name,
            )
    for scheduler in trainer.schedulers:
        if needs_metric(scheduler):
            raise TrainingError(
                f"{type(scheduler).__name__} needs the metric 'val/loss', but {missing}."
            )


def users_add_metrics(hooks: Any) -> bool:
    """Return whether hooks that are not built in receive the metrics, and may add to them."""
    users = [
        bind(hook)
        for _, hook, active in hooks.of_kind("loop")
        if active and not isinstance(hook, BuiltIn)
    ]
    return any(
        event in bindings and "metrics" in bindings[event].accepted
        for bindings in users
        for event in ("on_validation_end", "on_epoch_end")
    )


def needs_metric(scheduler: Any) -> bool:
    """Return whether `scheduler.step` takes a metric."""
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def checked_config(config: Any) -> TrainerConfig:
    """Return the configuration as a `TrainerConfig`."""
    if config is None:
        return TrainerConfig()
    if isinstance(config, HooksConfig):
        return TrainerConfig(hooks=config)
    if isinstance(config, Mapping):
        return TrainerConfig(**check_mapping("A trainer's config", config))
    expected = "a TrainerConfig, HooksConfig or mapping first: Trainer(config, model, optimizer)"
    check_instance("Trainer(config)", config, TrainerConfig, expected)
    return cast("TrainerConfig", config)


def check_gradient(loss: torch.Tensor) -> None:
    """Raise if backward through this loss would reach no parameter."""
    if not loss.requires_grad:
        raise TrainingError(
            "The loss has no gradient: nothing that it was computed from is a parameter that "
            "requires one. Look for `no_grad`, `detach` or frozen parameters."
        )


def checked_model(model: Any) -> torch.nn.Module:
    """Return the model; raise if it is not a module, or an engine of DeepSpeed."""
    check_instance("Trainer(…, model)", model, torch.nn.Module, "a torch.nn.Module")
    check_supported(model)
    return cast("torch.nn.Module", model)


def device_for(wanted: str | None, model: torch.nn.Module) -> torch.device:
    """Return the device to train on; raise if it is not available."""
    if wanted is None:
        return device_of(model)
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(
            f"The device '{wanted}' cannot be used here: {reason} Leave `device` out to train "
            f"where the model is ({device_of(model)})."
        ) from error
    return device


def checked_optimizers(
    value: Any, model: torch.nn.Module, every: Sequence[int] | None
) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a list; raise if they do not fit the model or each other."""
    optimizers = [value]
    if not isinstance(value, torch.optim.Optimizer):
        optimizers = read_items("optimizers", value, "one torch.optim.Optimizer or several")
    for optimizer in optimizers:
        check_instance("optimizers", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TrainingError(
                "LBFGS evaluates a closure many times in a step, which this loop does not support. "
                "Write the loop yourself, and add hooks to it with hookline.attach."
            )
    if not optimizers:
        raise TrainingError("A trainer needs at least one optimizer, got none.")
    if every is not None and (len(every) != len(optimizers) or 1 not in every):
        raise TrainingError(
            f"optimizer_every is {list(every)} for {len(optimizers)} optimizers. Expected one "
            "number for each, and a 1: to step less often altogether, use `accumulate`."
        )
    _check_parameters(optimizers, model)
    return optimizers


def _check_parameters(optimizers: list[torch.optim.Optimizer], model: torch.nn.Module) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owner: dict[int, int] = {}
    for i, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owner.setdefault(id(parameter), i) != i:
                    raise TrainingError(
                        f"Optimizers {owner[id(parameter)]} and {i} share the parameter "
                        f"'{names.get(id(parameter), '?')}'. Give each parameter to one of them."
                    )
    if not owner.keys() & names.keys():
        raise TrainingError("The optimizers hold none of this model's parameters.")
    without = [names[id(p)] for p in model.parameters() if p.requires_grad and id(p) not in owner]
    if without:
        log.warning("No optimizer holds these parameters, so they are not trained: %s", without)


def match_schedulers(value: Any, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Return the schedulers in a list; raise if one has an optimizer that is not the trainer's."""
    schedulers = [value]
    if isinstance(value, list | tuple):
        schedulers = read_items("schedulers", value, "a list of schedulers")
    schedulers = [scheduler for scheduler in schedulers if scheduler is not None]
    for scheduler in schedulers:
        made_for = read_attribute(scheduler, "optimizer")
        if isinstance(scheduler, type) or not any(made_for is one for one in optimizers):
            raise ArgumentError(
                f"schedulers has {show_value(scheduler)}; expected schedulers that were made with "
                "the trainer's optimizers, such as StepLR(optimizer, step_size=10)."
            )
    return schedulers


# -- several processes ----------------------------------------------------------------------------


def check_same_training(trainer: Trainer, training: Mapping[str, Any]) -> None:
    """Raise, in all processes, if their hooks, settings, optimizers or loaders differ.

    `training` describes the trainer, as in the run's manifest.
    """
    processes, described = trainer.strategy.processes, _describe(trainer, training)
    own = {name: number_items(to_jsonable(value)) for name, value in described.items()}
    main = processes.broadcast(own)
    problems = [
        _explain(name, processes.rank, main[name], own[name])
        for name in own
        if list(own[name].items()) != list(main[name].items())  # in the same order
    ]
    for found in processes.gather(problems[:1]):
        if found:
            raise TrainingError(found[0])


def require_all_processes(trainer: Trainer, function: str) -> None:
    """Raise if a hook that is not called in all processes calls what all of them have to call."""
    hook = find_limited_hook()
    if hook is not None and trainer.strategy.is_distributed:
        raise CollectiveError(
            f"{function} was called in the hook '{hook.name}', which is not called in all "
            f"processes (ranks='{hook.ranks}'). All of them have to call it, so it would wait for "
            f"ever. Register the hook with ranks='all', and use the result in one process."
        )


def _describe(trainer: Trainer, training: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what has to be the same in all processes, by its name in the message."""
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
            **{f"optimizer {i}": one for i, one in enumerate(training["optimizers"])},
            "schedulers": training.get("schedulers", []),
        },
        "loaders": {what: [] if s is None else list(s.names) for what, s in streams.items()},
    }


def _explain(section: str, rank: int, main: dict[str, Any], other: dict[str, Any]) -> str:
    shown = [
        f"{name}: {_show(of_main)} in rank 0, {_show(of_other)} in rank {rank}"
        for name, (of_main, of_other) in diff_configs(main, other).items()
    ] or ["the order"]
    return (
        f"The {section} of the processes differ ({join_some(shown, _SHOWN)}). Give all processes "
        "the same: they would wait for each other, or train other models. A hook that one process "
        "needs is registered in all, with ranks='main'."
    )


def _show(value: Any) -> str:
    return "missing" if value is None else str(value)
