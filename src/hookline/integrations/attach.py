"""attach: add hooks to a training loop, whoever wrote it.

The options of all loops are those of `attach`: a callback for another library's trainer takes them,
too. `session_options` checks them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch

from hookline.arguments import (
    check_flag,
    check_function,
    check_instance,
    check_mapping,
    check_name,
    check_path,
    describe_value,
    listed_strings,
    read_items,
    show_value,
)
from hookline.config.hook_items import make_registration
from hookline.config.trainer_config import CheckpointConfig, checked_hparams
from hookline.dispatch import HookLike, HookManager, HookSettings
from hookline.errors import ArgumentError, listed
from hookline.hook import Hook
from hookline.integrations.bare_loop.loop_checks import saves_checkpoints
from hookline.integrations.bare_loop.loop_parts import (
    accumulated_batches,
    find_optimizer,
    loop_parts,
)
from hookline.integrations.bare_loop.session import Session
from hookline.interrupts import HeldInterrupts

if TYPE_CHECKING:
    from hookline.runs.run import Run

_LIBRARIES = {  # by module and name of the class, so that nothing is imported to find out
    ("transformers.trainer", "Trainer"): "transformers",
    ("lightning.pytorch.trainer.trainer", "Trainer"): "lightning",
    ("pytorch_lightning.trainer.trainer", "Trainer"): "lightning",
    ("ignite.engine.engine", "Engine"): "ignite",
    ("accelerate.accelerator", "Accelerator"): "accelerate",
}

_OF_LIBRARY = ("allow_missing", "evaluator")  # without effect in a bare loop
_OF_LOOP = ("on_stop", "step_of")  # without effect in another library's trainer
_OF_PARTS = ("model", "optimizer", "evaluator", "schedulers", "scaler", "loss_divided")
"""Arguments that a trainer knows by itself, unless it is an Ignite engine."""


class DefaultRuns(Enum):
    """Where runs are written if the user does not say: `runs`, if a hook logs values to the run."""

    IF_RECORDED = "runs"


def attach(
    target: Any = None,
    optimizer: Any = None,
    hooks: Iterable[HookLike] | HookManager = (),
    *,
    schedulers: Any = (),
    scaler: torch.amp.GradScaler | None = None,
    step_of: Any = None,
    config: Any = None,
    tokens: Callable[[Any], int] | Literal["auto"] | None = "auto",
    settings: HookSettings | None = None,
    loss_divided: bool | None = None,
    on_stop: Literal["warn", "raise"] = "warn",
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
            one), or several, such as a generator and a discriminator: a list, or a mapping with
            their names. Hooks get several as one module that contains them in this order.
        optimizer: the optimizer of a bare loop or an Ignite engine, or several: a list, or a
            mapping with names, by which losses and rates are recorded. They are those of torch, or
            objects with `param_groups`, `step` and `zero_grad`. A step is complete when each of
            them has stepped; or, once one has stepped again before another, whenever that one
            steps. None in a bare loop: an optimizer of torch is found when it steps the model's
            parameters.
        hooks: hooks to register, in this order: hooks, `every(100, hook)`, or as in a config file
            names and mappings, `{"name": "lr_monitor", "every": 10}`; or a `HookRegistry`, whose
            hooks keep their names, schedules and order.
        schedulers: the learning-rate schedulers, one or several: they are saved in checkpoints. The
            loop steps them.
        scaler: the GradScaler, if the loop uses one. One that is not passed is found when it steps
            an attached optimizer, and is restored from a checkpoint that was loaded before.
        step_of: of several optimizers that step at different rates, the one whose step completes
            a step.
        config: the configuration, for hooks that ask for `config`.
        tokens: returns the number of tokens in a batch; by default the size of its `input_ids`, or
            of integer inputs with two or more dimensions; None if batches have no tokens.
        settings: how failing and costly hooks are treated.
        loss_divided: whether a loop with gradient accumulation divides its loss by the number of
            batches in a step. By default, this is read from the loss's graph; a loss that comes out
            of a compiled function needs it.
        on_stop: what happens if a hook asks to stop: "warn" waits for the loop to read
            `session.should_stop`, and warns if it goes on; "raise" raises `StopTraining` at the end
            of the step.
        runs: the folder for runs: each step's loss, the means of epochs, validations, checkpoints
            and toggles are recorded, as by the trainer. Or a run that is open for writing:
            `Run.open(folder, resume=True)` continues one. By default `runs`, if one of the hooks
            logs values to the run (`GradientMonitor`) or saves checkpoints, else none. None writes
            no run.
        checkpoints: how checkpoints are written: `background` and `on_failure` of
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
    """
    given = dict(locals())  # the arguments, by name
    library = _find_library(target)
    session: Session | None = None
    try:
        with HeldInterrupts():
            if library is None or library == "accelerate":
                session = _attach_to_loop(given, library)
            else:
                session = _attach_to_trainer(given, library)
            return session
    except BaseException as error:
        if session is not None:
            session.abandon(error)
        raise


def _find_library(target: Any) -> str | None:
    """Return the library whose trainer this is; None for the parts of a bare loop."""
    for kind in type(target).__mro__:
        if (library := _LIBRARIES.get((kind.__module__, kind.__name__))) is not None:
            return library
    return None


def _attach_to_loop(given: Mapping[str, Any], library: str | None) -> Session:
    """Attach hooks to a bare loop, whose optimizers an `Accelerator` may have prepared."""
    _refuse(given, _OF_LIBRARY, "a bare loop")
    target, optimizer, scaler = given["target"], given["optimizer"], given["scaler"]
    model = _loop_model(target, given["model"], is_accelerator=library == "accelerate")
    if library == "accelerate":
        scaler = scaler or target.scaler
    options = session_options(**given)
    parts = loop_parts(model, optimizer, options.schedulers, scaler, may_wait=True)
    session = Session(
        **parts,
        options=options,
        accumulated_batches=accumulated_batches(optimizer),
        step_of=find_optimizer(options.step_of, parts["optimizers"]),
    )
    if library == "accelerate":
        session.accelerator = target  # type: ignore[attr-defined]  # as in AccelerateTrainer
    return session


def _attach_to_trainer(given: Mapping[str, Any], library: str) -> Session:
    """Attach hooks to another library's trainer."""
    _refuse(given, _OF_LOOP, f"a trainer of {library}")
    if library != "ignite":
        _refuse(given, _OF_PARTS, f"a trainer of {library}")
    options = {name: value for name, value in given.items() if name != "target"}
    integration = import_module(f"hookline.integrations.{library}")
    session: Session = integration.attach_to_trainer(given["target"], options)
    return session


def _loop_model(target: Any, model: Any, *, is_accelerator: bool) -> Any:
    """Return the model of a bare loop, which is passed in one of two ways."""
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


def _refuse(given: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raise for options that have no effect here."""
    defaults = signature(attach).parameters
    unused = [n for n in names if n in given and not _is_default(given[n], defaults[n].default)]
    if unused:
        raise ArgumentError(f"attach(…) in {where} takes no {listed(unused)}: it has no effect.")


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


# -- the options of a session ---------------------------------------------------------------------


def callback_options(hooks: Any, given: Mapping[str, Any]) -> SimpleNamespace:
    """Return the checked options of a callback for another library's trainer."""
    parts = [name for name in _OF_PARTS if name != "loss_divided"]
    _refuse(given, ("target", *parts), "a callback")
    return session_options(hooks=hooks, **given)


def session_options(**given: Any) -> SimpleNamespace:
    """Return all options of `attach`, checked, with its defaults for those that are not given."""
    arguments = signature(attach).bind_partial(**given)
    arguments.apply_defaults()
    options = SimpleNamespace(**arguments.arguments)
    if not isinstance(options.on_stop, str) or options.on_stop not in ("warn", "raise"):
        raise ArgumentError(
            f'attach(…, on_stop=…) takes "warn" or "raise", not {show_value(options.on_stop)}.'
        )
    is_auto = isinstance(options.tokens, str) and options.tokens == "auto"
    if options.tokens is not None and not is_auto:
        check_function("attach(…, tokens=…)", options.tokens, "batch")
    for name in ("report", "allow_missing"):
        check_flag(f"attach(…, {name}=…)", getattr(options, name))
    if options.loss_divided is not None:
        check_flag("attach(…, loss_divided=…)", options.loss_divided)
    if (settings := options.settings) is not None:
        check_instance("attach(…, settings=…)", settings, HookSettings, "HookSettings or None")
    if options.name is not None:
        check_name("attach(…, name=…)", options.name)
    options.hooks = _hooks(options.hooks)
    options.checkpoints = _checkpoint_settings(options.checkpoints)
    options.hparams = checked_hparams(options.hparams)
    options.tags = listed_strings("attach(…, tags=…)", options.tags)
    options.trackers = _tracker_set(options.trackers)
    options.runs = _runs(options.runs, options.hooks, options.trackers)
    return options


def _tracker_set(given: Any) -> Any:
    """Return the trackers; None if there are none, which imports nothing."""
    if given is None or (type(given) in (list, tuple) and not given):
        return None
    from hookline.trackers.group import make_tracker_set

    return make_tracker_set(given)


def _checkpoint_settings(given: CheckpointConfig | Mapping[str, Any] | None) -> CheckpointConfig:
    if isinstance(given, CheckpointConfig):
        return given
    fields = {} if given is None else check_mapping("attach(…, checkpoints=…)", given)
    return CheckpointConfig(**fields)


def _hooks(given: Any) -> Any:
    """Return the hooks in a list; the manager refuses a hook alone, with what to write instead."""
    if given is None or isinstance(given, Hook | HookManager):
        return given or []
    items = read_items("attach(…, hooks=…)", given, "a list of hooks")
    return [make_registration(item) for item in items]


def _runs(given: Any, hooks: Any, trackers: Any) -> Any:
    """Return where runs are written: None, a folder, or a run that is open."""
    if isinstance(given, DefaultRuns):
        if isinstance(hooks, HookManager):
            own = [hooks.get_hook(name) for name in hooks.list_hooks()]
        else:
            own = [] if isinstance(hooks, Hook) else [one.hook for one in hooks]  # refused later
        records = any(getattr(hook, "hookline_records", False) for hook in own)
        records = records or trackers is not None or any(map(saves_checkpoints, own))
        return given.value if records else None
    if given is None or getattr(type(given), "__module__", "").startswith("hookline."):
        return given  # a run, whose class is not imported here
    return check_path("attach(…, runs=…)", given, "the folder for runs, a run or None")
