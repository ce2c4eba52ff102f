"""Attaching to a bare loop: what `hookline.attach` is given, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch

from hookline.arguments import (
    check_flag,
    check_function,
    check_instance,
    check_mapping,
    check_name,
    check_path,
    check_whole_number,
    describe_value,
    listed_strings,
    read_items,
    show_value,
)
from hookline.config.trainer_config import CheckpointConfig, checked_hparams
from hookline.dispatch import HookManager, HookSettings
from hookline.errors import ArgumentError, LoopError
from hookline.hook import Hook
from hookline.integrations.bare_loop.session import DefaultRuns, Session
from hookline.loop.model_watch import ModelGroup, check_supported

if TYPE_CHECKING:
    from hookline.runs.run import Run

__all__ = ["attach_to_loop", "loop_parts", "session_options", "unwrap_optimizer"]


def attach_to_loop(
    model: Any,
    optimizer: Any,
    hooks: Any,
    *,
    schedulers: Any = (),
    scaler: torch.amp.GradScaler | None = None,
    watch_generation: bool = False,
    **options: Any,
) -> Session:
    """Attach hooks to a bare loop; see `hookline.attach`."""
    checked = session_options(hooks, **options)
    parts = loop_parts(model, optimizer, schedulers, scaler)
    session = Session(
        **parts,
        watch_generation=watch_generation,
        accumulated_batches=_accumulated_batches(optimizer),
        **checked,
    )
    session.refuse_quietly()  # unless it is in a `with` block
    return session


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


def session_options(
    hooks: Any,
    *,
    config: Any = None,
    tokens: Callable[[Any], int] | Literal["auto"] | None = "auto",
    settings: HookSettings | None = None,
    loss_divided: bool | None = None,
    on_stop: Literal["warn", "raise"] = "warn",
    stop_grace: int = 10,
    runs: str | os.PathLike[str] | Run | DefaultRuns | None = DefaultRuns.IF_RECORDED,
    checkpoints: CheckpointConfig | Mapping[str, Any] | None = None,
    hparams: Mapping[str, Any] | None = None,
    name: str | None = None,
    tags: Iterable[str] = (),
    trackers: Any = (),
    report: bool = True,
) -> dict[str, Any]:
    """Return checked arguments of a session in any loop."""
    if not isinstance(on_stop, str) or on_stop not in ("warn", "raise"):
        raise ArgumentError(
            f'attach(…, on_stop=…) takes "warn" or "raise", not {show_value(on_stop)}.'
        )
    if tokens is not None and not _is_auto(tokens):
        check_function("attach(…, tokens=…)", tokens, "batch")
    check_whole_number("attach(…, stop_grace=…)", stop_grace)
    check_flag("attach(…, report=…)", report)
    if loss_divided is not None:
        check_flag("attach(…, loss_divided=…)", loss_divided)
    if settings is not None:
        check_instance("attach(…, settings=…)", settings, HookSettings, "HookSettings or None")
    if name is not None:
        check_name("attach(…, name=…)", name)
    return {
        "hooks": _hooks(hooks),
        "config": config,
        "tokens": tokens,
        "settings": settings,
        "loss_divided": loss_divided,
        "on_stop": on_stop,
        "stop_grace": stop_grace,
        "runs": _runs(runs),
        "checkpoints": _checkpoint_settings(checkpoints),
        "hparams": checked_hparams(hparams),
        "name": name,
        "tags": listed_strings("attach(…, tags=…)", tags),
        "trackers": _tracker_set(trackers),
        "report": report,
    }


def _tracker_set(given: Any) -> Any:
    """Return the trackers; None if there are none, which imports nothing."""
    if given is None or (type(given) in (list, tuple) and not given):
        return None
    from hookline.trackers.tracker_set import make_tracker_set

    return make_tracker_set(given)


def _checkpoint_settings(given: CheckpointConfig | Mapping[str, Any] | None) -> CheckpointConfig:
    if isinstance(given, CheckpointConfig):
        return given
    fields = {} if given is None else check_mapping("attach(…, checkpoints=…)", given)
    return CheckpointConfig(**fields)


def _is_auto(tokens: Any) -> bool:
    return isinstance(tokens, str) and tokens == "auto"


def _hooks(given: Any) -> Any:
    """Return the hooks in a list; the manager refuses a hook alone, with what to write instead."""
    if given is None or isinstance(given, Hook | HookManager):
        return given or []
    return read_items("attach(…, hooks=…)", given, "a list of hooks")


def _runs(given: Any) -> Any:
    """Return where runs are written: None, a folder, or a run that is open."""
    if given is None or isinstance(given, DefaultRuns):
        return given
    if getattr(type(given), "__module__", "").startswith("hookline."):  # a run, which is not loaded
        return given
    return check_path("attach(…, runs=…)", given, "the folder for runs, a run or None")


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


def _accumulated_batches(given: Any) -> int:
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
