"""What a training is configured with: validated objects whose errors name the field and the fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from hookline.dispatch import HookSettings
from hookline.errors import ConfigError, nearest

__all__ = ["HooksConfig", "HooksSettingsConfig", "LoadersConfig", "TrainerConfig"]


class Config(BaseModel):
    """The base: unknown keys and wrong values are one error that names each, with the fix."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_readable(type(self), error)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(_readable(type(self), error)) from None

    # As pydantic's own: it is not called for models within models, whose errors keep their path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def _readable(kind: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for one in error.errors():
        path = ".".join(str(part) for part in one["loc"])
        if one["type"] in ("extra_forbidden", "no_such_attribute"):
            fields = _fields_at(kind, one["loc"][:-1])
            hint = nearest(str(one["loc"][-1]), fields)
            lines.append(f"'{path}' is no field.{hint} The fields are: {', '.join(fields)}.")
        else:
            lines.append(f"'{path}' is {one['input']!r}. {one['msg']}.")
    return f"{kind.__name__}: " + "\n  ".join(lines)


def _fields_at(kind: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """The names of the fields of the model that stands at this path."""
    for part in path:
        inner = kind.model_fields[part].annotation if part in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return list(kind.model_fields)


class HooksSettingsConfig(Config):
    """How failing and costly hooks are treated; see `HookSettings`."""

    isolate: bool = True
    max_failures: PositiveInt = 3
    budget: PositiveFloat | None = 0.05
    budget_after: float = Field(default=5.0, ge=0)

    def settings(self) -> HookSettings:
        """Return it as the hook manager takes it."""
        return HookSettings(self.isolate, self.max_failures, self.budget, self.budget_after)


class HooksConfig(Config):
    """Which hooks a training has."""

    enable_logging_hook: bool = Field(default=False, description="log what happens")
    enable_gradient_monitor: bool = Field(default=False, description="record gradients")
    gradient_monitor_config: dict[str, Any] = Field(default={}, description="its options")
    enable_model_checkpoint_hook: bool = Field(default=False, description="keep the best")
    model_checkpoint_config: dict[str, Any] = Field(default={}, description="its options")
    enable_early_stopping_hook: bool = Field(default=False, description="stop on a plateau")
    early_stopping_config: dict[str, Any] = Field(default={}, description="its options")
    enable_lr_monitor: bool = Field(default=False, description="record learning rates")
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
        default=True, description="log each failure; they are counted in any case"
    )
    settings: HooksSettingsConfig = Field(
        default_factory=HooksSettingsConfig, description="how failing and costly hooks are treated"
    )

    def hooks(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the hooks to make, by class path or name, with their options."""
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
        """Return the settings as the hook manager takes them."""
        return replace(
            self.settings.settings(),
            isolate=self.settings.isolate and self.continue_on_hook_error,
            log_errors=self.log_hook_errors,
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
    """What a trainer does, apart from model, optimizers and data."""

    max_epochs: int | None = Field(default=1, ge=0, description="epochs; None for no limit")
    max_steps: int | None = Field(
        default=None, ge=0, description="optimizer steps; None for no limit"
    )
    device: str | None = Field(default=None, description="where to train; None: where the model is")
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: PositiveInt = Field(default=1, description="batches in one optimizer step")
    clip_norm: PositiveFloat | None = Field(
        default=None, description="largest norm of the gradients"
    )
    clip_value: PositiveFloat | None = Field(
        default=None, description="largest value in the gradients"
    )
    on_nan: Literal["stop", "skip", "continue"] = Field(
        default="stop",
        description="a loss that is not finite: stop (on an accelerator noticed one step late, "
        "without waiting for it), skip the step (waits for the device in every batch), or continue",
    )
    optimizer_every: list[PositiveInt] | None = Field(
        default=None, description="for each optimizer: it steps in each N-th step"
    )
    scheduler_every: Literal["step", "epoch"] = "step"
    validate_every_epochs: PositiveInt | None = 1
    validate_every_steps: PositiveInt | None = None
    sanity: bool = Field(default=False, description="validate before training, too")
    loaders: LoadersConfig = Field(default_factory=LoadersConfig)
    seed: int | None = None
    runs: Path | None = Field(
        default=Path("runs"), description="where run folders go; None for no record"
    )
    progress: Literal["auto", "bar", "plain", "jupyter", "off"] | bool = "auto"
    debug: bool = False
    hooks: HooksConfig = Field(default_factory=HooksConfig)
