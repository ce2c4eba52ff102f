"""The identity of a training run: its configuration, hooks, model, optimizers and data.

It is described when a loop is made, before anything changes it, for the run's manifest and for
finding the run that a restarted job continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hookline.dispatch import HookInfo
from hookline.masking import mask_secrets
from hookline.runs.jsonable import config_hash, to_jsonable
from hookline.tensors.name_patterns import module_class
from hookline.tensors.parameter_names import named_parameters

_MAX_PARAMETERS = 10_000  # names in a manifest

_NOT_OPTIONS = ("params", "param_names", "initial_lr")
_NOT_SETTINGS = (  # of a scheduler: what it derives from the optimizer, and its progress
    *("optimizer", "base_lrs", "T_cur", "T_i", "best", "cooldown_counter", "last_epoch"),
    "num_bad_epochs",
)


@dataclass(frozen=True)
class Identity:
    """The configuration, hooks and training objects of a loop, as it was made.

    Attributes:
        config: the resolved configuration.
        training: what `describe_training` returned.
        name: the name that the user gave the run; `tags`, too.
        config_is_complete: whether the configuration itself describes all of that, as that of a
            config file does: the configuration hash covers only the configuration then.
    """

    config: Mapping[str, Any]
    training: Mapping[str, Any]
    parameter_names: Sequence[str] = ()
    name: str | None = None
    tags: Sequence[str] = ()
    hparams: Mapping[str, Any] = field(default_factory=dict)
    config_is_complete: bool = False

    def describe(self, hooks: Sequence[HookInfo]) -> dict[str, Any]:
        """Return what a manifest has of the configuration, these hooks and the training, masked."""
        fields = self.collect(hooks)
        described = zip(fields["hooks"], hooks, strict=True)
        shown = [{**hook, "options": to_jsonable(info.options)} for hook, info in described]
        masked: dict[str, Any] = mask_secrets({**fields, "hooks": shown})
        return masked

    def collect(self, hooks: Sequence[HookInfo]) -> dict[str, Any]:
        """Return the same with secrets as they are."""
        return {
            "config": to_jsonable(self.config),
            "hooks": [_describe_hook(info) for info in hooks],
            "training": dict(self.training),
        }

    def hash(self, hooks: Sequence[HookInfo]) -> str:
        """Return the configuration hash, which covers hooks and training, too."""
        return config_hash(self.config if self.config_is_complete else self.collect(hooks))


def _describe_hook(info: HookInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "kind": info.kind,
        "class": info.cls,
        "options": to_jsonable(info.unmasked_options),
        "enabled": info.enabled,
        "schedule": info.schedule,
    }


def describe_training(loop: Any) -> dict[str, Any]:
    """Return the model, optimizers and data of a loop as JSON; secrets in `hparams` are not masked.

    Two runs with the same description were started in the same way. What changes during training,
    such as the learning rate that a scheduler has reached, is not part of it: a loop describes
    itself before it loads a checkpoint or trains.
    """
    models = loop.model if isinstance(loop.model, list | tuple) else [loop.model]
    optimizers = list(loop.optimizers)
    schedulers = [_describe_scheduler(s, optimizers) for s in getattr(loop, "schedulers", ())]
    description: dict[str, Any] = {
        "model": _describe_model(models[0]),
        "models": [_describe_model(model) for model in models[1:]],
        "optimizers": [_describe_optimizer(optimizer) for optimizer in optimizers],
        "schedulers": schedulers,
        "loaders": _describe_loaders(getattr(loop, "train_data", None)),
        "val_loaders": _describe_loaders(getattr(loop, "val_data", None)),
        "hparams": to_jsonable(getattr(loop, "hparams", None) or {}),
    }
    return {name: value for name, value in description.items() if value}


def list_parameters(loop: Any) -> list[str]:
    """Return the names of the model's parameters, as hooks log them; none if there are too many."""
    models = loop.model if isinstance(loop.model, list | tuple) else [loop.model]
    names = [name for model in models for name in named_parameters(model, None).values()]
    return to_jsonable(names) if len(names) <= _MAX_PARAMETERS else []


def _describe_model(model: Any) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "class": _class_name(model),
        "parameters": _count_elements(parameters),
        "trainable": _count_elements(p for p in parameters if p.requires_grad),
    }


def _count_elements(parameters: Iterable[Any]) -> int | None:
    try:
        return sum(int(parameter.numel()) for parameter in parameters)
    except Exception:  # lazy modules do not know the shapes yet
        return None


def _describe_optimizer(optimizer: Any) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
        if "initial_lr" in group:  # a scheduler changes `lr`
            options["lr"] = group["initial_lr"]
        options["parameters"] = _count_elements(group["params"])
        groups.append(to_jsonable(options))
    return {"class": _class_name(optimizer), "groups": groups}


def _describe_scheduler(scheduler: Any, optimizers: list[Any]) -> dict[str, Any]:
    options = {
        name: _describe_option(value)
        for name, value in vars(scheduler).items()
        if not name.startswith("_") and name not in _NOT_SETTINGS
    }
    driven = [i for i, o in enumerate(optimizers) if o is getattr(scheduler, "optimizer", None)]
    inner = [_describe_scheduler(s, optimizers) for s in getattr(scheduler, "_schedulers", ())]
    options |= {"optimizer": driven[0]} if driven else {}
    options |= {"milestones": scheduler._milestones} if hasattr(scheduler, "_milestones") else {}
    options |= {"schedulers": inner} if inner else {}
    return {"class": _class_name(scheduler), **to_jsonable(options)}


def _describe_option(value: Any) -> Any:
    """Return an option of a scheduler; a function by its name, because a `repr` has an address."""
    if isinstance(value, list | tuple):
        return [_describe_option(item) for item in value]
    return getattr(value, "__qualname__", value) if callable(value) else value


def _describe_loaders(data: Any) -> dict[str, Any]:
    if data is None:
        return {}
    loaders: Mapping[str, Any] = dict(zip(data.names, data.loaders, strict=True))
    return {name: _describe_loader(loader) for name, loader in loaders.items()}


def _describe_loader(loader: Any) -> dict[str, Any]:
    loader = getattr(loader, "whole_loader", loader)  # not what one of several processes loads
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    try:
        length = len(loader)
    except Exception:  # the loader has no length, or does not know it
        length = None
    return {
        "class": _class_name(loader),
        "batch_size": to_jsonable(batch_size),
        "length": length,
    }


def _class_name(value: Any) -> str:
    kind = module_class(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
