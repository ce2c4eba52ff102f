"""Configuration of a trainer: validated objects whose errors name the field and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from hookline.dispatch import HookSettings
from hookline.errors import ConfigError, nearest

__all__ = ["Config", "HooksConfig", "LoadersConfig", "TrainerConfig", "describe_fields"]


class Config(BaseModel):
    """Base class: unknown and invalid fields raise one `ConfigError` that names all of them."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_format_errors(type(self), error)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(_format_errors(type(self), error)) from None

    # Marks this as pydantic's own __init__: pydantic then does not call it for models within
    # models, whose errors keep their path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


UNKNOWN_FIELD_ERRORS = ("extra_forbidden", "no_such_attribute", "unexpected_keyword_argument")
"""The types of pydantic's errors about a field that does not exist."""


def _format_errors(model: type[BaseModel], error: ValidationError) -> str:
    lines: list[str] = []
    for detail in error.errors():
        path = ".".join(str(part) for part in detail["loc"])
        if detail["type"] in UNKNOWN_FIELD_ERRORS:
            known = describe_fields(model, detail["loc"][:-1])
            hint = nearest(str(detail["loc"][-1]), known)
            lines.append(f"Unknown field '{path}'.{hint} The fields are: {', '.join(known)}.")
        else:
            lines.append(f"'{path}' is {detail['input']!r}. {detail['msg']}.")
    return f"{model.__name__}: " + "\n  ".join(lines)


def describe_fields(model: type[Any], path: tuple[str | int, ...]) -> dict[str, str]:
    """Return the fields of the model at a path, with their descriptions.

    Where the annotation at the path has several models, the fields of all of them are returned.
    Parts of the path that are not fields, such as the index of a list, are skipped.
    """
    models = [model]
    for part in path:
        annotations = [_annotations(one)[part] for one in models if part in _annotations(one)]
        if annotations:
            models = [inner for one in annotations for inner in _find_models(one)]
    return {name: text for one in models for name, text in _descriptions(one).items()}


def _annotations(model: type[Any]) -> Mapping[Any, Any]:
    if is_dataclass(model):
        return {one.name: one.type for one in fields(model)}
    return {name: field.annotation for name, field in model.model_fields.items()}


def _descriptions(model: type[Any]) -> dict[str, str]:
    if is_dataclass(model):
        return {one.name: "" for one in fields(model)}
    return {
        field.alias or name: field.description or "" for name, field in model.model_fields.items()
    }


def _find_models(annotation: Any) -> list[type[Any]]:
    """Return the models in an annotation such as `list[Model] | None`."""
    if isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or is_dataclass(annotation)
    ):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _find_models(inner)]


class HooksConfig(Config):
    """The hooks of a trainer, and how their failures are treated."""

    enable_logging_hook: bool = Field(default=False, description="log events")
    enable_gradient_monitor: bool = Field(default=False, description="log gradient statistics")
    gradient_monitor_config: dict[str, Any] = Field(default={}, description="its options")
    enable_model_checkpoint_hook: bool = Field(
        default=False, description="keep the best checkpoint"
    )
    model_checkpoint_config: dict[str, Any] = Field(default={}, description="its options")
    enable_early_stopping_hook: bool = Field(
        default=False, description="stop when a metric no longer improves"
    )
    early_stopping_config: dict[str, Any] = Field(default={}, description="its options")
    enable_lr_monitor: bool = Field(default=False, description="log learning rates")
    lr_monitor_config: dict[str, Any] = Field(default={}, description="its options")
    hook_classes: list[str] = Field(
        default=[], description="further hooks, in order: class paths, or names of built-ins"
    )
    hook_configs: dict[str, dict[str, Any]] = Field(
        default={}, description="their options, by the same class path or name"
    )
    continue_on_hook_error: bool = Field(
        default=True, description="a failing hook does not stop training"
    )
    log_hook_errors: bool = Field(
        default=True, description="log each failure; failures are always counted"
    )
    settings: HookSettings = Field(
        default_factory=HookSettings, description="how failing and costly hooks are treated"
    )

    def hooks(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the class path or name of each hook to create, with its options."""
        own = {
            "logging": (self.enable_logging_hook, {}),
            "gradient_monitor": (self.enable_gradient_monitor, self.gradient_monitor_config),
            "lr_monitor": (self.enable_lr_monitor, self.lr_monitor_config),
            "early_stopping": (self.enable_early_stopping_hook, self.early_stopping_config),
            "model_checkpoint": (self.enable_model_checkpoint_hook, self.model_checkpoint_config),
        }
        unused = [path for path in self.hook_configs if path not in self.hook_classes]
        if unused:
            raise ConfigError(
                f"HooksConfig: hook_configs has options for '{unused[0]}', which is not in "
                f"hook_classes.{nearest(unused[0], self.hook_classes)}"
            )
        further = [(path, self.hook_configs.get(path, {})) for path in self.hook_classes]
        return further + [(name, options) for name, (on, options) in own.items() if on]

    def manager_settings(self) -> HookSettings:
        """Return the settings of the hook manager."""
        return replace(
            self.settings,
            isolate=self.settings.isolate and self.continue_on_hook_error,
            log_errors=self.settings.log_errors and self.log_hook_errors,
        )


class LoadersConfig(Config):
    """How several training loaders become one stream."""

    order: Literal["sequential", "round_robin", "alternating", "weighted"] = "sequential"
    pattern: list[str | int] | None = Field(
        default=None, description="for alternating: loaders, repeated"
    )
    weights: dict[str, float] | list[float] | None = Field(
        default=None, description="for weighted: shares"
    )
    length: Literal["sum", "longest", "shortest"] | PositiveInt = "sum"
    on_exhausted: Literal["cycle", "drop"] = "cycle"


class TrainerConfig(Config):
    """The settings of a trainer, apart from model, optimizers and data."""

    max_epochs: int | None = Field(
        default=1, ge=0, description="number of epochs; None for no limit"
    )
    max_steps: int | None = Field(
        default=None, ge=0, description="number of optimizer steps; None for no limit"
    )
    device: str | None = Field(
        default=None, description="device to train on; None: the model's device"
    )
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: PositiveInt = Field(default=1, description="batches per optimizer step")
    clip_norm: PositiveFloat | None = Field(
        default=None, description="maximum norm of the gradients"
    )
    clip_value: PositiveFloat | None = Field(
        default=None, description="maximum absolute value of gradients"
    )
    on_nan: Literal["stop", "skip", "continue"] = Field(
        default="stop",
        description="what to do about a loss that is not finite: stop (on an accelerator this is "
        "noticed one step late, without synchronization), skip the step (synchronizes with the "
        "device in every batch), or continue",
    )
    optimizer_every: list[PositiveInt] | None = Field(
        default=None, description="for each optimizer: it steps every N-th step"
    )
    scheduler_every: Literal["step", "epoch"] = "step"
    validate_every_epochs: PositiveInt | None = 1
    validate_every_steps: PositiveInt | None = None
    sanity: bool = Field(default=False, description="also validate before training")
    loaders: LoadersConfig = Field(default_factory=LoadersConfig)
    seed: int | None = None
    runs: Path | None = Field(
        default=Path("runs"), description="the folder for run folders; None writes no run"
    )
    progress: Literal["auto", "bar", "plain", "jupyter", "off"] | bool = "auto"
    debug: bool = False
    hooks: HooksConfig = Field(default_factory=HooksConfig)
