"""Making an `Accelerator` of Hugging Face Accelerate, and checking one that the user has made."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch

from hookline.arguments import show_value
from hookline.config.trainer_config import TrainerConfig
from hookline.errors import ArgumentError, TrainingError
from hookline.loop.processes import world_size

__all__ = ["check_accelerator", "choose_accelerate", "is_launched", "make_accelerator"]

_SUPPORTED = "Supported are a single process, DDP, and FSDP2 (fsdp_version 2)."
_MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def is_launched() -> bool:
    """Return whether `accelerate launch` has started this process, and Accelerate is installed."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ and find_spec("accelerate") is not None


def choose_accelerate(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration with the strategy for an Accelerator.

    Raises:
        TrainingError: the configuration has another strategy.
    """
    if config.strategy not in ("auto", "accelerate"):
        raise TrainingError(
            f"The configuration has strategy='{config.strategy}', which does not use an "
            "Accelerator. Use strategy='accelerate', or leave it out."
        )
    return config.model_copy(update={"strategy": "accelerate"})


def make_accelerator(config: TrainerConfig) -> Any:
    """Return an Accelerator as `accelerate launch`, or else the configuration, says.

    Raises:
        TrainingError: Accelerate is not installed, or cannot be used as it is configured.
    """
    accelerator_class = _accelerator_class()
    _check_environment()
    is_cpu = config.device == "cpu" or (config.device is None and not _has_device())
    precision = config.precision if "precision" in config.model_fields_set else None
    try:
        accelerator = accelerator_class(
            cpu=is_cpu,
            mixed_precision=None if precision is None else _MIXED_PRECISION[precision],
            gradient_accumulation_steps=config.accumulate,
        )
    except (ValueError, ImportError, NotImplementedError) as error:
        raise TrainingError(
            f"Accelerate cannot be started: {error} If this script has an Accelerator already, "
            "give it to the trainer: AccelerateTrainer(…, accelerator=accelerator)."
        ) from error
    return accelerator


def check_accelerator(accelerator: Any, config: TrainerConfig) -> None:
    """Raise unless a trainer can use the Accelerator.

    Raises:
        TrainingError: it has an unsupported plugin, or another device or number of processes.
    """
    if not isinstance(accelerator, _accelerator_class()):
        raise ArgumentError(
            f"accelerator is {show_value(accelerator)}, a {type(accelerator).__name__}; expected "
            "an accelerate.Accelerator."
        )
    if unsupported := _unsupported(accelerator):
        raise TrainingError(
            f"The Accelerator uses {unsupported}, which the trainer does not support. {_SUPPORTED}"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise TrainingError("Accelerate has no fp16 on the CPU. Use mixed_precision='bf16'.")
    if accelerator.num_processes != world_size():
        raise TrainingError(
            f"The Accelerator has {accelerator.num_processes} process, but this script runs in "
            f"{world_size()} (WORLD_SIZE, or the process group's size): each would train a model "
            "of its own. On the CPU, use Accelerator(cpu=True), or start the script with "
            "`accelerate launch --cpu`."
        )
    device = None if config.device is None else torch.device(config.device)
    if device is not None and device.type != accelerator.device.type:
        raise TrainingError(
            f"The configuration has device='{config.device}', but the Accelerator has the device "
            f"'{accelerator.device}'. Leave `device` out."
        )


def _accelerator_class() -> Any:
    try:
        from accelerate import Accelerator  # type: ignore[import-untyped]
    except ImportError as error:
        raise TrainingError(
            "The strategy 'accelerate' needs Hugging Face Accelerate, which cannot be imported "
            f"({error}): pip install 'hookline[accelerate]'."
        ) from error
    return Accelerator


def _has_device() -> bool:
    """Return whether this machine has another device than the CPU."""
    return torch.accelerator.is_available()


def _check_environment() -> None:
    """Raise for plugins that `accelerate launch` asks for: an Accelerator would need them."""
    for variable, name in {
        "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
        "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    }.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise TrainingError(
                f"The configuration of `accelerate launch` asks for {name} ({variable}), which the "
                f"trainer does not support. {_SUPPORTED}"
            )


def _unsupported(accelerator: Any) -> str | None:
    """Return what the Accelerator uses that a trainer does not support."""
    state, kind = accelerator.state, accelerator.distributed_type.value
    parallel = getattr(state, "parallelism_config", None)
    uses_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        return {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}[kind]
    if kind == "FSDP" and not accelerator.is_fsdp2:
        return "FSDP 1"
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "fp16":
        return "FSDP2 with fp16, whose overflow each process would notice on its own"
    if kind == "MULTI_CPU" and uses_fsdp:
        return "an FSDP plugin on the CPU, where Accelerate ignores it (strategy='fsdp' shards)"
    for name in ("tp", "cp", "sp"):
        if getattr(parallel, f"{name}_enabled", False):
            return f"tensor, context or sequence parallelism ({name}_size above 1)"
    if accelerator.mixed_precision not in _MIXED_PRECISION.values():
        return f"mixed_precision='{accelerator.mixed_precision}'"
    if state.dynamo_plugin.backend.value != "NO":
        return "a dynamo plugin (give the trainer a model that torch.compile has compiled)"
    return None
