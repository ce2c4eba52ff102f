"""The parts of a loop that is not ours: model, optimizers, schedulers and scaler, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from hookline.arguments import describe_value, read_items
from hookline.errors import ArgumentError, LoopError
from hookline.loop.model_watch import ModelGroup, check_supported


def loop_parts(model: Any, optimizer: Any, schedulers: Any, scaler: Any) -> dict[str, Any]:
    """Return the checked `model`, `optimizers`, `schedulers` and `scaler` of a loop.

    An optimizer that Accelerate has prepared brings its scaler with it.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(
            f"attach(…, scaler=…) takes a torch.amp.GradScaler, not {describe_value(scaler)}."
        )
    attached = _one_module(model)
    return {
        "model": attached,
        "optimizers": _optimizers(optimizer, attached),
        "schedulers": _schedulers(schedulers),
        "scaler": _prepared_scaler(optimizer) if scaler is None else scaler,
    }


def _prepared_scaler(given: Any) -> torch.amp.GradScaler | None:
    """Return the scaler through which optimizers that Accelerate has prepared step."""
    for optimizer in given if isinstance(given, list | tuple) else [given]:
        is_prepared = any(
            kind.__module__ == "accelerate.optimizer" for kind in type(optimizer).__mro__
        )
        if is_prepared and isinstance(optimizer.scaler, torch.amp.GradScaler):
            return optimizer.scaler
    return None


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
    """Return several models as one."""
    if not isinstance(models, list | tuple):
        return models
    models = read_items("attach(model, …)", models, "one or several torch.nn.Modules")
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(
                f"attach([model, …], …) takes torch.nn.Modules, not {describe_value(model)}."
            )
    return models[0] if len(models) == 1 else ModelGroup(models)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper, such as Accelerate's."""
    with suppress(Exception):  # of an object that is not an optimizer, which is refused next
        while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            optimizer = optimizer.optimizer
    return optimizer


def accumulated_batches(given: Any) -> int:
    """Return by which number Accelerate divides losses; 0 without a prepared optimizer."""
    first = next(iter(given), None) if isinstance(given, list | tuple) else given
    count = getattr(getattr(first, "gradient_state", None), "num_steps", 0)
    return count if isinstance(count, int) else 0


def _optimizers(given: Any, model: Any) -> list[torch.optim.Optimizer]:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"attach(model, …) takes a torch.nn.Module, not {describe_value(model)}. Instead of a "
            "model it takes a Trainer of transformers, TRL or Lightning, an Ignite Engine, or an "
            "Accelerator."
        )
    check_supported(model)
    is_several = isinstance(given, Iterable) and not isinstance(
        given, str | bytes | Mapping | torch.nn.Module | torch.Tensor
    )
    if is_several:
        given = read_items("attach(model, optimizer=…)", given, "one or several optimizers")
    optimizers = [unwrap_optimizer(optimizer) for optimizer in (given if is_several else [given])]
    for optimizer in optimizers:
        if not hasattr(type(optimizer), "register_step_pre_hook"):
            raise ArgumentError(
                "attach(model, optimizer, …) takes the torch.optim.Optimizer that the loop steps, "
                f"or a list of several, not {describe_value(optimizer)}. Make it first: "
                "`optimizer = torch.optim.AdamW(model.parameters())`."
            )
    if not optimizers:
        raise ArgumentError("attach(model, optimizer, …) needs at least one optimizer, got none.")
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise ArgumentError("The same optimizer was given twice. Give each once.")
    own = {id(parameter) for parameter in model.parameters()}
    held = (
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    )
    if not any(id(parameter) in own for parameter in held):
        raise LoopError(
            "The optimizer holds none of this model's parameters. Attach the model that it trains, "
            "or make the optimizer after wrapping or moving the model."
        )
    return optimizers
