"""What a training run is: its configuration, hooks, model, optimizers and data.

It is described when a loop is made, before anything changes it, for the run's manifest and for
finding the run that a restarted job continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hookline.dispatch import HookInfo
from hookline.masking import mask_secrets
from hookline.runs.jsonable import config_hash, to_jsonable

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity:
    """What a loop trains, as it was made.

    Attributes:
        config: the resolved configuration.
        training: the description of model, optimizers, schedulers, data and hyperparameters.
        parameter_names: the names of the model's parameters.
        name: the name that the user gave the run.
        tags: the tags that the user gave it.
        hparams: the hyperparameters.
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
        """Return what a manifest has of the configuration, these hooks and the training.

        Secrets are masked.
        """
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
