"""The strategies for several processes with copies of the model (DDP), or shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hookline.config.trainer_config import TrainerConfig
from hookline.errors import TrainingError, listed
from hookline.loop.broadcasts import BufferBroadcast, broadcast_weights
from hookline.loop.processes import SingleProcessGroup
from hookline.tensors.name_patterns import matches_glob
from hookline.tensors.sharded import whole
from hookline.trainer.strategies.single_process import SingleProcess


class GradientSync:
    """Sets whether the next backward of a DDP wrapper or of an FSDP2 model reduces gradients.

    The forward of a DDP wrapper prepares that, so the loss has to be computed with it. FSDP2 does
    not broadcast buffers as DDP does: this does.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._handle: Any = None
        self._buffers: BufferBroadcast | None = None
        if isinstance(model, DistributedDataParallel):
            self._handle = model.register_forward_pre_hook(self._note_call)
        else:
            self._buffers = BufferBroadcast(model)
        self._is_called = self._handle is None

    def _note_call(self, *_: Any) -> None:
        self._is_called = True
        self._handle.remove()

    def set(self, sync: bool) -> None:
        """Set whether the next backward reduces gradients."""
        if self._buffers is None:
            self._model.require_backward_grad_sync = sync  # read by forward
        else:
            self._model.set_requires_gradient_sync(sync)
            self._buffers.syncs = sync

    def require_call(self) -> None:
        """Raise if the wrapper was never called, so that gradients would not be averaged."""
        if not self._is_called:
            raise TrainingError(
                "step_fn(model, batch) has computed the loss without calling `model`, which "
                "averages the gradients of all processes when it is called: each process would "
                "train a model of its own. Call `model(…)`, not the model itself or its methods."
            )

    def close(self) -> None:
        """Reduce gradients in every backward, and remove the hooks from the model."""
        self.set(True)
        if self._buffers is not None:
            self._buffers.close()
        else:
            self._handle.remove()


class DataParallel(SingleProcess):
    """Train the same model in several processes on different batches; gradients are averaged."""

    def prepare(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        """Return the model with rank 0's weights: it may be validated or copied before training."""
        prepared = super().prepare(model, optimizers)
        broadcast_weights(model)
        return prepared

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return what the loop calls instead of the model; the weights of rank 0 are used."""
        wrapper = DistributedDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            find_unused_parameters=self.config.ddp.find_unused_parameters,
            gradient_as_bucket_view=self.config.ddp.gradient_as_bucket_view,
        )
        self._sync = GradientSync(wrapper)
        return wrapper


class FullySharded(SingleProcess):
    """Train one model whose parameters, gradients and optimizer states are sharded, in fp32."""

    is_sharded = True
    forward_is_collective = True

    def __init__(
        self, device: torch.device, config: TrainerConfig, processes: SingleProcessGroup
    ) -> None:
        super().__init__(device, config, processes)
        if self.scaler is not None:
            raise TrainingError(
                "precision='fp16' is not supported with strategy='fsdp'. Use 'bf16' or 'fp32'."
            )
        self._policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        self._dtype = None  # FSDP2 casts by itself

    def prepare(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        """Shard the model in place, and give the optimizers its sharded parameters."""
        if isinstance(model, FSDPModule):  # the user has sharded it
            return model, optimizers
        check_scalars(model)
        for optimizer in optimizers:
            if optimizer.state:
                raise TrainingError(
                    f"The {type(optimizer).__name__} has a state of the whole parameters already, "
                    "before the model is sharded. Make the optimizer anew, and let "
                    "`fit(resume_from=…)` restore its state."
                )
        broadcast_weights(model.to(self.device))
        names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._shard(model)
        sharded = dict(model.named_parameters(remove_duplicate=False))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [sharded[names[id(p)]] for p in group["params"]]
        return model, optimizers

    def _shard(self, model: torch.nn.Module) -> None:
        mesh = init_device_mesh(self.device.type, (self.processes.size,))
        options: Any = {
            "mesh": mesh,
            "mp_policy": self._policy,
            "reshard_after_forward": self.config.fsdp.reshard_after_forward,
        }
        for module in find_units(model, self.config.fsdp.wrap):
            fully_shard(module, **options)
        fully_shard(model, **options)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model, whose processes have rank 0's buffers in every step from now on."""
        self._sync = GradientSync(model)
        return model

    def clip(
        self, optimizer: torch.optim.Optimizer, norm: float | None, value: float | None
    ) -> torch.Tensor:
        """Clip an optimizer's gradients by their norm over all ranks; return it."""
        return whole(super().clip(optimizer, norm, value))


def check_scalars(model: torch.nn.Module) -> None:
    """Raise if the model has a parameter that FSDP2 cannot shard: one without a dimension."""
    scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    if scalars:
        raise TrainingError(
            f"FSDP2 shards parameters by their first dimension, and these have none, because they "
            f"are scalars: {listed(scalars)}. Expected parameters with one dimension or more. Make "
            "them with one element, as `nn.Parameter(torch.ones(1))`, or use strategy='ddp'."
        )


def find_units(model: torch.nn.Module, wrap: Sequence[str]) -> list[torch.nn.Module]:
    """Return the modules that are sharded one by one, by class or name, inner ones first."""
    modules = {name: module for name, module in model.named_modules() if name}
    classes = {type(module).__name__ for module in modules.values()}
    chosen: set[str] = set()
    for pattern in wrap:
        of_class = [n for n, module in modules.items() if type(module).__name__ == pattern]
        found = of_class or [name for name in modules if matches_glob(pattern, name)]
        if not found:
            raise TrainingError(
                f"fsdp.wrap has '{pattern}', which is neither the class nor the name of a module. "
                f"The classes are {listed(sorted(classes))}."
            )
        chosen |= set(found)
    return [module for name, module in reversed(modules.items()) if name in chosen]
