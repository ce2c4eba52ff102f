"""The parts of a loop that is not ours: model, optimizers, schedulers and scaler, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

from hookline.arguments import check_name, describe_value, read_items
from hookline.errors import ArgumentError, LoopError
from hookline.integrations.bare_loop.optimizer_watch import (
    AwaitedOptimizer,
    has_step_hooks,
    holds_any,
    is_like_optimizer,
)
from hookline.loop.model_watch import ModelGroup, check_supported

foreign_optimizers: WeakSet[Any] = WeakSet()
"""Optimizers that a script steps though no model has their parameters: `Lint` says so."""


def loop_parts(
    model: Any, optimizer: Any, schedulers: Any, scaler: Any, *, may_wait: bool = False
) -> dict[str, Any]:
    """Return the checked `model`, `optimizers`, `schedulers` and `scaler` of a loop.

    An optimizer that Accelerate has prepared brings its scaler with it. With `may_wait`, the
    optimizer may be None: it is found when it steps.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(
            f"attach(…, scaler=…) takes a torch.amp.GradScaler, not {describe_value(scaler)}."
        )
    attached = _one_module(model)
    _check_model(attached)
    waits = optimizer is None and may_wait
    return {
        "model": attached,
        "optimizers": [AwaitedOptimizer(attached)] if waits else _optimizers(optimizer, attached),
        "names": tuple(optimizer) if isinstance(optimizer, Mapping) else (),
        "schedulers": _schedulers(schedulers),
        "scaler": _prepared_scaler(optimizer) if scaler is None else scaler,
    }


def _prepared_scaler(given: Any) -> torch.amp.GradScaler | None:
    """Return the scaler through which optimizers that Accelerate has prepared step."""
    scalers = (getattr(optimizer, "scaler", None) for optimizer in _listed(given))
    return next((each for each in scalers if isinstance(each, torch.amp.GradScaler)), None)


def _listed(given: Any) -> Any:
    """Return one or several optimizers, which may have names, as a sequence."""
    if isinstance(given, Mapping):
        return list(given.values())
    return given if isinstance(given, list | tuple) else [given]


def _schedulers(given: Any) -> list[Any]:
    """Return one or several schedulers as a list."""
    several = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
    schedulers = [given] if given is not None else []
    if several:
        schedulers = read_items("attach(…, schedulers=…)", given, "one or several schedulers")
    for scheduler in schedulers:
        if not hasattr(type(scheduler), "load_state_dict"):
            raise ArgumentError(
                "attach(…, schedulers=…) takes schedulers with `state_dict` and `load_state_dict`, "
                f"not {describe_value(scheduler)}."
            )
    return schedulers


def _one_module(models: Any) -> Any:
    """Return several models as one; those of a mapping with their names."""
    if not isinstance(models, list | tuple | Mapping):
        return models
    names: list[str] = []
    if isinstance(models, Mapping):
        names, models = list(models), list(models.values())
    models = read_items("attach(model, …)", models, "one or several torch.nn.Modules")
    if not models:
        raise ArgumentError(
            "attach(model, …) got no model: expected one or several torch.nn.Modules."
        )
    try:
        return models[0] if len(models) == 1 and not names else ModelGroup(models, names)
    except (TypeError, KeyError) as error:  # of torch, for something else than modules and names
        raise ArgumentError(
            "attach([model, …], …) takes torch.nn.Modules, and names that a module may have: "
            f"{error}."
        ) from error


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper, such as Accelerate's."""
    if has_step_hooks(optimizer):
        return optimizer
    inner = optimizer
    with suppress(Exception):  # of an object that is not an optimizer, or not torch's
        while not has_step_hooks(inner):
            inner = inner.optimizer
        return inner
    return optimizer


def accumulated_batches(given: Any) -> int:
    """Return by which number Accelerate divides losses; 0 without a prepared optimizer."""
    first = next(iter(_listed(given)), None)
    count = getattr(getattr(first, "gradient_state", None), "num_steps", 0)
    return count if isinstance(count, int) else 0


def find_optimizer(given: Any, optimizers: list[Any]) -> int | None:
    """Return the number of the optimizer that was given as `step_of`; None without one."""
    if given is None:
        return None
    inner = unwrap_optimizer(given)
    for i, optimizer in enumerate(optimizers):
        if optimizer is inner:
            return i
    raise ArgumentError(
        f"attach(…, step_of=…) takes one of the optimizers that are attached, not "
        f"{describe_value(given)}: attach(model, [first, second], step_of=first)."
    )


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"attach(model, …) takes a torch.nn.Module, not {describe_value(model)}. Instead of a "
            "model it takes a Trainer of transformers, TRL or Lightning, an Ignite Engine, or an "
            "Accelerator."
        )
    check_supported(model)


def _optimizers(given: Any, model: torch.nn.Module) -> list[Any]:
    if isinstance(given, Mapping):
        for name in given:
            check_name("attach(…, {name: optimizer})", name)
        given = list(given.values())
    is_several = isinstance(given, Iterable) and not isinstance(
        given, str | bytes | torch.nn.Module | torch.Tensor
    )
    if is_several:
        given = read_items("attach(model, optimizer=…)", given, "one or several optimizers")
    optimizers = [unwrap_optimizer(optimizer) for optimizer in (given if is_several else [given])]
    for optimizer in optimizers:
        if isinstance(optimizer, type) or not (
            has_step_hooks(optimizer) or is_like_optimizer(optimizer)
        ):
            raise ArgumentError(
                "attach(model, optimizer, …) takes the optimizer that the loop steps (an object "
                "with `param_groups`, `step` and `zero_grad`), or a list of several, not "
                f"{describe_value(optimizer)}. Make it first, or leave it out: attach(model, …) "
                "finds a torch.optim.Optimizer when it steps. A loop without an optimizer calls "
                "its hooks: `hookline.HookRunner(hooks)`."
            )
    if not optimizers:
        raise ArgumentError("attach(model, optimizer, …) needs at least one optimizer, got none.")
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise ArgumentError("The same optimizer was given twice. Give each once.")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(holds_any(each, own) or each in foreign_optimizers for each in optimizers):
        raise LoopError(
            "The optimizer holds none of this model's parameters. Attach the model that it trains, "
            "or make the optimizer after wrapping or moving the model."
        )
    return optimizers
