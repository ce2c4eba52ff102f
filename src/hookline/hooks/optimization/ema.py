"""EMA: keeps an exponential moving average of the weights, for validation and export."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from hookline.errors import TrainingError, listed
from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.tensors.full_tensor import full_tensor
from hookline.tensors.name_patterns import module_places
from hookline.tensors.sharded import is_sharded, local, reshard, shard_like

log = logging.getLogger("hookline")

_DEFAULT_WARMUP = 10

# These handle all tensors in one call.
_lerp = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
_copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class EMA(BuiltIn):
    """Keeps an exponential moving average of the weights, and validates with it.

    Every N completed steps, `average = d * average + (1 - d) * weights` with `d = decay ** N` is
    computed on the device; in the first N steps, in each. Training itself does not change, bit for
    bit. For validation the average is copied into the model; afterwards the training weights are
    restored, also if validation fails. Checkpoints always contain the training weights as the
    model's, and the average as this hook's state: even during validation, `model.state_dict()`
    returns the training weights.

    Users' hooks run first: in `on_validation_start` they still see the training weights, and in
    `on_validation_end` still the average. To show the average to another hook in
    `on_validation_start` too, register this one with `before=`.

    `averaged_state_dict()` returns the model's `state_dict` with the average, to save it, and
    `apply_to(model)` copies it into another model. Buffers are the model's own.

    Frozen parameters are not averaged until they require a gradient; tied ones are averaged once.
    The average of float16 and bfloat16 parameters is kept in float32.

    Args:
        decay: the decay of the average per step.
        warmup: limit the decay to `(1 + n) / (w + n)` after n updates, so that the initial weights
            are forgotten quickly: w is this number, or 10 for True.
        every: update the average every N steps, after the first N.
        validate_with: use the average for validation.
    """

    critical = True  # it holds the training weights while the average is in the model
    intervenes = True  # it changes the weights for validation
    hookline_group = HookGroup.MONITOR
    every_name = "every_n_steps"
    cost = (
        "One fused pass over the weights per update, and memory for one more copy of the trained "
        "weights, for two during validation."
    )

    def __init__(
        self,
        decay: Annotated[float, Field(ge=0, lt=1)] = 0.999,
        warmup: bool | PositiveInt = True,
        every: PositiveInt = 10,
        validate_with: bool = True,
    ) -> None:
        self._decay = decay
        self._warmup = _DEFAULT_WARMUP if warmup is True else int(warmup)
        self.every = every
        if not validate_with:  # a bare loop then need not provide validation
            self.on_validation_start = None  # type: ignore[method-assign, assignment]
            self.on_validation_end = None  # type: ignore[method-assign, assignment]
        self._model: nn.Module | None = None
        self._averages: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._frozen: dict[str, Tensor] = {}  # not averaged yet
        self._training_weights: dict[str, Tensor] | None = None
        self._handle: Any = None
        self._is_training = self._stepped = self._resumed = False
        self.updates = self._steps = 0

    # -- events -----------------------------------------------------------------------------------

    def on_train_start(self, model: nn.Module) -> None:
        self._restore_weights()
        if not self._resumed:
            self._averages, self.updates, self._steps = {}, 0, 0
        self._attach(model)
        self._is_training = True

    def on_before_optimizer_step(self, model: nn.Module) -> None:
        """Start averages of unfrozen parameters; check that the training weights are in place."""
        if not self._is_training:  # the hook was added during training
            self.on_train_start(model)
        for name in [name for name, tensor in self._frozen.items() if tensor.requires_grad]:
            self._start_average(name, self._frozen.pop(name))  # unchanged so far
        if self._training_weights is not None:
            log.warning(
                "A validation did not end, and training continued with the averaged weights. The "
                "training weights are restored now; this step's gradients are those of the average."
            )
            self._restore_weights()

    def on_after_optimizer_step(self) -> None:
        self._stepped = True

    def on_step_end(self) -> None:
        if not self._stepped:
            return
        self._stepped = False
        self._steps += 1
        if self._steps <= self.every:
            self._update(self._decay)
        elif self._steps % self.every == 0:
            self._update(self._decay**self.every)

    def on_validation_start(self) -> None:
        self._restore_weights()  # if a validation never ended
        self._use_average()

    def on_train_end(self) -> None:
        self._restore_weights()
        self._is_training = self._resumed = False

    # -- for users --------------------------------------------------------------------------------

    def averaged_state_dict(self) -> dict[str, Any]:
        """Return the model's `state_dict` with the average instead of the weights."""
        model = self._model
        if model is None:
            raise TrainingError("There is no average yet, because training has not started.")
        state = dict(model.state_dict())
        cast: dict[str, Tensor] = {}  # tied parameters stay one tensor
        for name, first in _first_names(_tensors(model)).items():
            if name in state and first in self._averages:
                average = self._averages[first]
                cast.setdefault(first, average.detach().to(state[name].dtype, copy=True))
                state[name] = cast[first]
        return state

    def apply_to(self, model: nn.Module) -> None:
        """Copy the averaged weights, and the rest of the model's state, into another model.

        If this model is sharded and the other is not, all ranks have to call this.
        """
        state = self.averaged_state_dict()
        if not any(map(is_sharded, model.parameters())):
            state = full_tensor(state)
        _unwrapped(model).load_state_dict(state)

    # -- the average ------------------------------------------------------------------------------

    def _attach(self, model: nn.Module) -> None:
        self._model = model = _unwrapped(model)
        self._weights, self._frozen = {}, {}
        tensors = _tensors(model)
        names = _first_names(tensors)
        known = {name: tensors[name] for name in names.values()}
        other = [
            name
            for name, average in self._averages.items()
            if name not in known or known[name].shape != average.shape
        ]
        if other:
            raise TrainingError(
                f"The average from the checkpoint has {listed(other, 5)}, which the model does not "
                "have, or in another shape. Resume with the model of the run."
            )
        for name, tensor in known.items():
            if not tensor.requires_grad and name not in self._averages:
                self._frozen[name] = tensor
            else:
                self._start_average(name, tensor)

    @torch.no_grad()
    def _start_average(self, name: str, tensor: Tensor) -> None:
        """Start the average of a tensor with the loaded value, or with its own."""
        dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
        loaded = self._averages.get(name)
        source = tensor.detach() if loaded is None else shard_like(loaded, tensor)
        self._averages[name] = source.to(tensor.device, dtype, copy=True)
        self._weights[name] = tensor

    @torch.no_grad()
    def _update(self, decay: float) -> None:
        if self._warmup:
            decay = min(decay, (1 + self.updates) / (self._warmup + self.updates))
        averages = [self._averages[name] for name in self._weights]
        weights = [
            tensor if tensor.dtype == average.dtype else tensor.to(average.dtype)
            for tensor, average in zip(self._weights.values(), averages, strict=True)
        ]
        if averages:
            _lerp([*map(local, averages)], [*map(local, weights)], 1 - decay)
        self.updates += 1

    @torch.no_grad()
    def _use_average(self) -> None:
        if self._model is None or not self._weights:
            return
        kept = {name: tensor.detach().clone() for name, tensor in self._weights.items()}
        # torch sets an attribute on the hook, which a bound method does not allow.
        swap = partial(self._save_training_weights)
        self._handle = self._model.register_state_dict_post_hook(swap)
        self._training_weights = kept
        averages = [local(self._averages[name]) for name in self._weights]
        _copy([*map(local, self._weights.values())], averages)
        reshard(self._model)

    @torch.no_grad()
    def _restore_weights(self) -> None:
        kept = self._training_weights
        if kept is None:
            return
        _copy([local(self._weights[name]) for name in kept], [*map(local, kept.values())])
        if self._model is not None:
            reshard(self._model)
        self._training_weights = None
        self._handle.remove()
        self._handle = None

    on_validation_end = on_exception = _restore_weights
    cancel_validation = _restore_weights  # if a signal ends a validation

    def _save_training_weights(
        self, model: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """Replace the average by the training weights in a `state_dict` of the model."""
        for name, first in _first_names(_tensors(model)).items():
            kept = (self._training_weights or {}).get(first)
            if kept is not None and prefix + name in state:
                state[prefix + name] = kept

    # -- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self._averages), "updates": self.updates, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restore_weights()
        self._averages = dict(state["averages"])
        self.updates, self._steps = int(state["updates"]), int(state["steps"])
        if self._is_training and self._model is not None:
            self._attach(self._model)
        self._resumed = True


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers (`torch.compile`, DDP), which change parameters' names."""
    return next(place.module for place in module_places(model) if not place.is_wrapper)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what can be averaged; tied tensors under each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {n: t for n, t in parameters if t.is_floating_point() or t.is_complex()}


def _first_names(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return the first name of the tensor for every name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
