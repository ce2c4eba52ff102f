"""attach: add hooks to a training loop, whoever wrote it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch

from hookline.arguments import check_flag, describe_value
from hookline.config.trainer_config import CheckpointConfig
from hookline.dispatch import HookManager, HookSettings
from hookline.errors import ArgumentError, listed
from hookline.hook import Hook
from hookline.integrations.bare_loop.attach import attach_to_loop
from hookline.integrations.bare_loop.session import DefaultRuns, Session
from hookline.interrupts import HeldInterrupts

if TYPE_CHECKING:
    from hookline.runs.run import Run

__all__ = ["attach"]

_HOSTS = {  # by module and name of the class, so that nothing is imported to find out
    ("transformers.trainer", "Trainer"): "transformers",
    ("lightning.pytorch.trainer.trainer", "Trainer"): "lightning",
    ("pytorch_lightning.trainer.trainer", "Trainer"): "lightning",
    ("ignite.engine.engine", "Engine"): "ignite",
    ("accelerate.accelerator", "Accelerator"): "accelerate",
}


def attach(
    target: Any = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    hooks: Iterable[Hook] | HookManager = (),
    *,
    schedulers: Any = (),
    scaler: torch.amp.GradScaler | None = None,
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
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    evaluator: Any = None,
    allow_missing: bool = False,
    watch_generation: bool = False,
) -> Session:
    """Attach hooks to a training loop, which stays unchanged.

        with hookline.attach(model, optimizer, hooks=[Watch()]):
            …  # the loop, unchanged

        session = hookline.attach(trainer, hooks=[Watch()])  # of transformers, TRL, Lightning
        trainer.train()

        hookline.attach(engine, model=model, optimizer=optimizer, hooks=[Watch()])  # of Ignite
        hookline.attach(accelerator, model=model, optimizer=optimizer, hooks=[Watch()])

    Hooks that need what such a loop does not provide (epochs, batches, validation, checkpoints)
    raise an error before the first step, with the call on the session that provides it.

    Args:
        target: a Hugging Face `Trainer` (TRL's are subclasses), a Lightning `Trainer`, an Ignite
            `Engine`, the `Accelerator` of a loop, which hooks get as `trainer.accelerator`, or the
            model of a bare loop: as the loop calls it (the compiled or wrapped one, if there is
            one), or several, such as a generator and a discriminator. Hooks get several as one
            module that contains them in this order.
        optimizer: the optimizer of a bare loop or an Ignite engine, or several. A step is complete
            when each of them has stepped.
        hooks: hooks to register, in this order; or a `HookRegistry`, whose hooks keep their names,
            schedules and order.
        schedulers: the learning-rate schedulers, one or several: they are saved in checkpoints. The
            loop steps them.
        scaler: the GradScaler, if the loop uses one; needed to see skipped steps. That of a
            prepared optimizer of Accelerate is found.
        config: the configuration, for hooks that ask for `config`.
        tokens: returns the number of tokens in a batch; by default the size of its `input_ids`, or
            of integer inputs with two or more dimensions; None if batches have no tokens.
        settings: how failing and costly hooks are treated.
        loss_divided: whether a loop with gradient accumulation divides its loss by the number of
            batches in a step. By default, this is read from the loss's graph; a loss that comes out
            of a compiled function needs it.
        on_stop: what happens if a hook asks to stop and the loop goes on without reading
            `session.should_stop`: a warning, or `StopTraining` at the end of a step.
        stop_grace: how many more steps such a loop may take before `StopTraining`.
        runs: the folder for runs: each step's loss, the means of epochs, validations, checkpoints
            and toggles are recorded, as by the trainer. Or a run that is open for writing:
            `Run.open(folder, resume=True)` continues one. By default `runs`, if one of the hooks
            logs values to the run (`GradientMonitor`) or saves checkpoints, else none. None writes
            no run.
        checkpoints: how checkpoints are written: `background`, `when_busy` and `on_failure` of
            `CheckpointConfig`.
        hparams: hyperparameters of the run.
        name: a name for the run.
        tags: tags for the run.
        trackers: experiment trackers that the run is also written to: names (`tensorboard`,
            `wandb`, `mlflow`, `trackio`), mappings with `name` and options, or objects.
        report: write the run's report when it ends, if plotly is installed.
        model: the model that an Ignite engine trains; or, as a keyword, that of a bare loop.
        evaluator: the Ignite engine that validates the model.
        allow_missing: in another library's trainer, only warn about hooks that need an event which
            it does not give.
        watch_generation: let probes see the forwards of `model.generate`, too.
    """
    common: dict[str, Any] = {
        "config": config,
        "tokens": tokens,
        "settings": settings,
        "runs": runs,
        "checkpoints": checkpoints,
        "hparams": hparams,
        "name": name,
        "tags": tags,
        "trackers": trackers,
        "report": report,
    }
    of_parts: dict[str, Any] = {
        "schedulers": schedulers,
        "scaler": scaler,
        "loss_divided": loss_divided,
    }
    of_loop: dict[str, Any] = {"on_stop": on_stop, "stop_grace": stop_grace}
    check_flag("attach(…, allow_missing=…)", allow_missing)
    check_flag("attach(…, watch_generation=…)", watch_generation)
    common["watch_generation"] = watch_generation
    host = _find_host(target)
    if host is None or host == "accelerate":
        of_host = {"allow_missing": allow_missing, "evaluator": evaluator}
        _refuse(of_host, {"allow_missing": False, "evaluator": None}, "a bare loop")
        given = _loop_model(target, model, is_accelerator=host == "accelerate")
        if host == "accelerate":
            of_parts["scaler"] = scaler or target.scaler
        attach_hooks = partial(
            attach_to_loop, given, optimizer, hooks, **of_parts, **of_loop, **common
        )
    else:
        _refuse(of_loop, {"on_stop": "warn", "stop_grace": 10}, f"a trainer of {host}")
        parts = {"model": model, "optimizer": optimizer, "evaluator": evaluator, **of_parts}
        if host != "ignite":  # whose engine knows none of them
            defaults = {**dict.fromkeys(parts), "schedulers": ()}
            _refuse(parts, defaults, f"a trainer of {host}")
            parts = {}
        integration = import_module(f"hookline.integrations.{host}")
        common["allow_missing"] = allow_missing
        attach_hooks = partial(integration.attach_to_trainer, target, hooks, **parts, **common)
    session: Session | None = None
    try:
        with HeldInterrupts():
            session = attached = attach_hooks()
            if host == "accelerate":
                attached.accelerator = target  # type: ignore[attr-defined]  # as in AccelerateTrainer
            return attached
    except BaseException as error:
        if session is not None:
            session.abandon(error)
        raise


def _find_host(target: Any) -> str | None:
    """Return the library whose trainer this is; None for the parts of a bare loop."""
    for kind in type(target).__mro__:
        if (host := _HOSTS.get((kind.__module__, kind.__name__))) is not None:
            return host
    return None


def _loop_model(target: Any, model: Any, *, is_accelerator: bool) -> Any:
    """Return the model of a bare loop, given in one of two ways."""
    if is_accelerator:
        if model is None:
            raise ArgumentError(
                "attach(accelerator, …) needs what the Accelerator has prepared: "
                "attach(accelerator, model=model, optimizer=optimizer, hooks=[…])."
            )
        return model
    if target is not None and model is not None:
        raise ArgumentError(
            f"attach(…, model=…) is for an Ignite engine or an Accelerator; the first argument is "
            f"{describe_value(target)}. Give the model once."
        )
    return model if target is None else target


def _refuse(given: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
    """Raise for options that have no effect here."""
    names = [name for name, value in given.items() if not _is_default(value, defaults[name])]
    if names:
        raise ArgumentError(f"attach(…) in {where} takes no {listed(names)}: it has no effect.")


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))
