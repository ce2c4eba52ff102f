"""Configuration of a trainer: validated objects whose errors name the field and the fix."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    StrictInt,
    StrictStr,
    model_validator,
)

from hookline.arguments import check_mapping, user_path
from hookline.config.config_model import Config
from hookline.dispatch import HookSettings
from hookline.errors import ConfigError, nearest

Order = Literal["sequential", "round_robin", "alternating", "weighted"]
Length = Literal["sum", "longest", "shortest"]
OnExhausted = Literal["cycle", "drop"]
Weight = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


_FLOAT32_MAX = 3.4028234663852886e38  # gradients have this type


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


class MixConfig(Config):
    """How several training loaders become one stream; see `hookline.trainer.data_stream`.

    Args:
        order: which loader the next batch comes from.
        pattern: for "alternating": loaders by name or number, repeated: `("web", "web", "code")`.
        weights: for "weighted": a positive number for each loader, by name or in the loaders'
            order; they need not add up to 1. The next batch comes from the loader that is furthest
            behind its weight, without random numbers. When a loader is dropped, the others go on by
            their weights.
        length: where an epoch ends: a number of batches, or by the loaders' lengths.
        on_exhausted: an exhausted loader is started again ("cycle") or dropped for the rest of the
            epoch ("drop").

    Example:
        >>> from hookline.trainer.data_stream import Stream
        >>> web, code = ["w0", "w1", "w2"], ["c0"]
        >>> stream = Stream({"web": web, "code": code}, MixConfig("round_robin", length="longest"))
        >>> [batch for batch, *_ in stream.epoch()]
        ['w0', 'c0', 'w1', 'c0', 'w2', 'c0']
    """

    model_config = ConfigDict(frozen=True)

    order: Order = "sequential"
    pattern: list[StrictStr | StrictInt] | None = Field(
        default=None, min_length=1, description="for alternating: loaders, repeated"
    )
    weights: dict[str, Weight] | list[Weight] | None = Field(
        default=None, description="for weighted: a number for each loader"
    )
    length: Length | Annotated[int, Field(strict=True, gt=0, le=sys.maxsize)] = "sum"
    on_exhausted: OnExhausted = "cycle"

    def __init__(self, /, order: Any = "sequential", pattern: Any = None, **data: Any) -> None:
        super().__init__(order=order, pattern=pattern, **data)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for name, order in (("pattern", "alternating"), ("weights", "weighted")):
            if (getattr(self, name) is not None) != (self.order == order):
                raise ValueError(
                    f"order is '{self.order}'; expected {name} with order='{order}', and only with "
                    f"it: MixConfig('{order}', {name}=…)."
                )
        return self


class CheckpointConfig(Config):
    """How a trainer saves checkpoints, and what it does when the process is asked to end."""

    background: bool = Field(
        default=True,
        description="write while training continues; false: training waits for the disk",
    )
    on_failure: Literal["continue", "stop"] = Field(
        default="continue", description="what to do if a checkpoint cannot be written"
    )
    on_crash: bool = Field(
        default=False,
        description="save the state after an exception as well, in `checkpoints/crash_…`; it is "
        "never resumed from unless its folder is named",
    )
    signals: list[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"]] = Field(
        default=["SIGTERM", "SIGUSR1", "SIGUSR2"],
        description="signals that save a checkpoint and end training; Ctrl-C does so too",
    )
    grace_seconds: PositiveFloat | None = Field(
        default=None,
        description="the time between the signal and the end of the process: a warning says when "
        "saving takes longer; None: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, where it is set",
    )
    requeue: bool = Field(
        default=False, description="under SLURM, requeue the job after such a signal"
    )


class DDPConfig(Config):
    """Options of `strategy="ddp"`, for `torch.nn.parallel.DistributedDataParallel`."""

    find_unused_parameters: bool = Field(
        default=False,
        description="parameters need not all be used in every batch, which costs time; without it "
        "unused parameters are an error",
    )
    gradient_as_bucket_view: bool = Field(
        default=True,
        description="gradients are views of the memory in which they are averaged; a hook that "
        "keeps a gradient after its step has to clone it",
    )


class FSDPConfig(Config):
    """How `strategy="fsdp"` shards a model, with `torch.distributed.fsdp.fully_shard`."""

    wrap: list[str] = Field(
        default=[],
        description="modules that are sharded one by one: names of their classes, or patterns of "
        "their names, such as `blocks.*`; the rest is sharded as a whole",
    )
    reshard_after_forward: bool | None = Field(
        default=None,
        description="free the gathered parameters after forward and gather them again for "
        "backward; None: all but those of the root",
    )


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
    strategy: Literal["auto", "single", "ddp", "fsdp", "accelerate"] = Field(
        default="auto",
        description="how several processes, as `torchrun` starts them, train together: ddp, fsdp "
        "(sharded parameters), accelerate (as Hugging Face Accelerate is configured); auto: "
        "accelerate if `accelerate launch` has started them, else ddp, or a single process",
    )
    ddp: DDPConfig = Field(default_factory=DDPConfig, description="options of ddp")
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig, description="how fsdp shards the model")
    shard_loaders: bool = Field(
        default=True,
        description="each of several processes takes some of the loaders' batches; false: "
        "their loaders have different data already",
    )
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: PositiveInt = Field(default=1, description="batches per optimizer step")
    clip_norm: PositiveFloat | None = Field(
        default=None, description="maximum norm of the gradients"
    )
    clip_value: PositiveFloat | None = Field(
        default=None, le=_FLOAT32_MAX, description="maximum absolute value of gradients"
    )
    on_nan: Literal["stop", "skip", "continue"] = Field(
        default="stop",
        description="what to do about a loss that is not finite: stop (on an accelerator one step "
        "late), skip the step (waits for the device in every batch), or continue",
    )
    optimizer_every: list[PositiveInt] | None = Field(
        default=None, description="for each optimizer: it steps every N-th step"
    )
    scheduler_every: Literal["step", "epoch"] = "step"
    validate_every_epochs: PositiveInt | None = 1
    validate_every_steps: PositiveInt | None = None
    sanity: bool = Field(default=False, description="also validate before training")
    loaders: MixConfig = Field(default_factory=MixConfig)
    seed: int | None = Field(
        default=None,
        ge=-(2**63),
        lt=2**63,
        description="seeds Python, torch and numpy (if imported) when training starts",
    )
    runs: Annotated[Path, AfterValidator(user_path)] | None = Field(
        default=Path("runs"), description="the folder for run folders; None writes no run"
    )
    report: bool = Field(
        default=True,
        description="writes report.html into the folder of a run that completed or was stopped, "
        "if plotly is installed (`hookline[report]`)",
    )
    checkpoints: CheckpointConfig = Field(default_factory=CheckpointConfig)
    progress: Literal["auto", "bar", "plain", "off"] | bool = Field(
        default="auto",
        description="`auto`: a bar in a terminal, and plain lines elsewhere; True is `auto`, False "
        "is `off`, which prints nothing, not even the run's folder",
    )
    debug: bool = False
    hooks: HooksConfig = Field(default_factory=HooksConfig)


def checked_hparams(hparams: Any) -> dict[str, Any]:
    """Return the hyperparameters as a dict; an `argparse.Namespace` counts as a mapping."""
    if hparams is None:
        return {}
    is_plain = isinstance(hparams, Mapping | type) or not hasattr(type(hparams), "__dict__")
    return check_mapping("hparams", hparams if is_plain else getattr(hparams, "__dict__", hparams))
