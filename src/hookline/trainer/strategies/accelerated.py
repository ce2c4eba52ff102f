"""The strategy that runs on Hugging Face Accelerate, in one process or several."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hookline.arguments import show_value
from hookline.config.trainer_config import TrainerConfig
from hookline.errors import ArgumentError, TrainingError
from hookline.loop.processes import join_processes, world_size
from hookline.tensors.sharded import whole
from hookline.trainer.strategies.several_processes import GradientSync, check_scalars
from hookline.trainer.strategies.single_process import SingleProcess

_SUPPORTED = "Supported are a single process, DDP, and FSDP2 (fsdp_version 2)."
_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}  # Accelerate's name, and ours


class Accelerated(SingleProcess):
    """Train with an `Accelerator`: one process, DDP or FSDP2, as it was configured.

    The Accelerator prepares the model and the optimizers. Mixed precision is that of its `prepare`:
    the model's forward is autocast and returns fp32, the loss is computed outside of it. Without an
    Accelerator, one is made as `accelerate launch`, or else the configuration, says.
    """

    has_trigger = True

    def __init__(self, accelerator: Any, config: TrainerConfig) -> None:
        if accelerator is None:
            accelerator = _make_accelerator(config)
        _check_accelerator(accelerator, config)
        super().__init__(accelerator.device, config, join_processes(accelerator.device))
        self.accelerator = accelerator
        self._dtype, self.scaler = None, accelerator.scaler  # the prepared forward is autocast
        self.needs_transfer = accelerator.device.type != "cpu" and accelerator.device_placement
        self.is_sharded = self.forward_is_collective = bool(accelerator.is_fsdp2)
        self.config = self._complete(config)
        self._model: Any = None  # as it was prepared
        self._optimizers: dict[int, Any] = {}  # the prepared ones, by the id of those within
        self._schedulers: dict[int, Any] = {}  # the same; only those that the user has prepared
        self._seen_trigger = accelerator.flag_tensor

    # -- settings ---------------------------------------------------------------------------------

    def _complete(self, config: TrainerConfig) -> TrainerConfig:
        """Return the configuration with the Accelerator's precision and accumulation, or raise."""
        accelerator = self.accelerator
        precision = _PRECISIONS[accelerator.mixed_precision]
        if config.precision != precision and "precision" in config.model_fields_set:
            raise TrainingError(
                f"The configuration has precision='{config.precision}', but the Accelerator has "
                f"mixed_precision='{accelerator.mixed_precision}'. Leave `precision` out, or make "
                "the Accelerator with the same."
            )
        steps, accumulate = accelerator.gradient_accumulation_steps, config.accumulate
        if "accumulate" not in config.model_fields_set:
            accumulate = steps
        elif steps not in (1, accumulate):
            raise TrainingError(
                f"The configuration has accumulate={accumulate}, but the Accelerator has "
                f"gradient_accumulation_steps={steps}. Leave one of them out."
            )
        accelerator.gradient_accumulation_steps = accumulate
        return config.model_copy(update={"precision": precision, "accumulate": accumulate})

    # -- model, optimizers, schedulers ------------------------------------------------------------

    def prepare(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        """Prepare what is not prepared yet; return the model and the optimizers within."""
        accelerator, plain = self.accelerator, [_unwrap(one) for one in optimizers]
        prepared = [one for one in [*accelerator._optimizers, *optimizers] if _is_prepared(one)]
        known = {id(_unwrap(one)) for one in prepared}
        unprepared: list[Any] = [one for one in plain if id(one) not in known]
        self._model = model
        if not getattr(model, "_is_accelerate_prepared", False):
            unprepared.insert(0, model)
            if self.is_sharded:
                check_scalars(model)
        try:
            added = accelerator.prepare(*unprepared) if unprepared else []
        except (ValueError, KeyError, NotImplementedError) as error:
            text = f"accelerator.prepare(model, optimizers) failed: {error}"
            raise TrainingError(text) from error
        for one in [added] if len(unprepared) == 1 else added:
            if isinstance(one, torch.nn.Module):
                self._model = one
            else:
                prepared.append(one)
        self._optimizers = {id(_unwrap(one)): one for one in prepared}
        return accelerator.unwrap_model(self._model), plain

    def unwrap_schedulers(self, schedulers: Any) -> Any:
        """Return the schedulers within those that the user has prepared."""
        several = list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
        for i, scheduler in enumerate(several):
            if hasattr(scheduler, "step_with_optimizer") and hasattr(scheduler, "scheduler"):
                several[i] = scheduler.scheduler
                self._schedulers[id(several[i])] = scheduler
        return several

    def stepped_scheduler(self, scheduler: Any) -> Any:
        """Return what is stepped with an optimizer: a scheduler as the user has prepared it.

        Accelerate's steps once for each process, because each step has the batches of all.
        """
        return self._schedulers.get(id(scheduler), scheduler)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the prepared model, which the loop calls."""
        # Accelerators share it.
        self.accelerator.gradient_accumulation_steps = self.config.accumulate
        if isinstance(self._model, DistributedDataParallel | FSDPModule):
            self._sync = GradientSync(self._model)
        self.begin_batch(completes_step=True, sync=True)
        return self._model  # type: ignore[no-any-return]

    def unwrap(self) -> None:
        """Leave the Accelerator as if the last batch had completed a step."""
        self.begin_batch(completes_step=True, sync=True)
        super().unwrap()

    # -- a step -----------------------------------------------------------------------------------

    def begin_batch(self, *, completes_step: bool, sync: bool) -> None:
        """Set `accelerator.sync_gradients`, and whether the next backward reduces gradients."""
        self.accelerator.sync_gradients = completes_step
        always = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")
        super().begin_batch(completes_step=completes_step, sync=sync or bool(always))

    # Backward is not `accelerator.backward`, which would divide the loss by the number of batches
    # in a step once more, and by the wrong one in the last step of an epoch.

    def clip(
        self, optimizer: torch.optim.Optimizer, norm: float | None, value: float | None
    ) -> torch.Tensor:
        """Clip an optimizer's gradients by their norm over all ranks; return it."""
        # Not `accelerator.clip_grad_norm_`, which would unscale gradients a second time, and under
        # FSDP2 compares parameters by their values if an optimizer has not all of the model's.
        return whole(super().clip(optimizer, norm, value))

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step; return False if the scaler skipped it, as `optimizer_step_was_skipped` says."""
        prepared = self._optimizers[id(optimizer)]
        if self.scaler is None:
            prepared.step()
            return True
        # Accelerate's would change the scale before the next optimizer's gradients are unscaled.
        stepped = super().step(optimizer)
        prepared._is_overflow = not stepped
        return stepped

    def stop_reason(self) -> str | None:
        """Return why to stop if this process has called `accelerator.set_trigger()`, else None."""
        trigger = self.accelerator.flag_tensor
        if trigger is self._seen_trigger:
            return None
        self._seen_trigger = trigger
        if trigger is None or not trigger.item():
            return None
        self.accelerator.flag_tensor = self._seen_trigger = None
        return "accelerator.set_trigger() was called"

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the states of objects that `accelerator.register_for_checkpointing` was given."""
        registered = self.accelerator._custom_objects
        return {str(i): one.state_dict() for i, one in enumerate(registered)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        for i, one in enumerate(self.accelerator._custom_objects):
            if str(i) in state:
                one.load_state_dict(state[str(i)])


def _is_prepared(optimizer: Any) -> bool:
    """Return whether an optimizer is Accelerate's, with the user's in it."""
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]

    return isinstance(optimizer, AcceleratedOptimizer)


def _unwrap(optimizer: Any) -> Any:
    while _is_prepared(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _make_accelerator(config: TrainerConfig) -> Any:
    """Return an Accelerator as `accelerate launch`, or else the configuration, says."""
    accelerator_class = _accelerator_class()
    is_cpu = config.device == "cpu" or (
        config.device is None and not torch.accelerator.is_available()
    )
    names = {ours: name for name, ours in _PRECISIONS.items()}
    precision = names[config.precision] if "precision" in config.model_fields_set else None
    try:
        return accelerator_class(
            cpu=is_cpu,
            mixed_precision=precision,
            gradient_accumulation_steps=config.accumulate,
        )
    except (ValueError, ImportError, NotImplementedError) as error:
        raise TrainingError(
            f"Accelerate cannot be started: {error} If this script has an Accelerator already, "
            "give it to the trainer: AccelerateTrainer(…, accelerator=accelerator)."
        ) from error


def _check_accelerator(accelerator: Any, config: TrainerConfig) -> None:
    """Raise unless a trainer can use the Accelerator."""
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
            f"{world_size()} processes: each would train a model of its own. On the CPU, use "
            "Accelerator(cpu=True), or `accelerate launch --cpu`."
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
    if accelerator.mixed_precision not in _PRECISIONS:
        return f"mixed_precision='{accelerator.mixed_precision}'"
    if state.dynamo_plugin.backend.value != "NO":
        return "a dynamo plugin (give the trainer a model that torch.compile has compiled)"
    return None
