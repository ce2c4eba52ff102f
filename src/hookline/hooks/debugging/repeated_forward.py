"""Repeating a model's forward to find the first module that makes a value that is not finite.

The forward runs on a copy of the model, so that buffers such as the statistics of a BatchNorm,
attributes, gradients and Hookline's hooks on the model are not touched. The copy shares the
parameters: an operation that would change one ends the forward, and so does one that communicates
with other processes, which do not take part. Random generators are restored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.loop.random_state import random_state, restore_random_state
from hookline.tensors.device_numbers import read_tensors
from hookline.tensors.name_patterns import is_fsdp_module, unwrap_module
from hookline.tensors.nested import map_tensors, tensors_in
from hookline.tensors.norms import extremes
from hookline.tensors.sharded import is_sharded


class CannotRepeatError(Exception):
    """A forward cannot be repeated without an effect on training, or fails."""


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A call of a model, with the arguments and under the autocast that it had."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[tuple[str, torch.dtype], ...]


@dataclass(eq=False)
class _Measured:
    """The smallest and largest values of a call's inputs and outputs, on the device."""

    module: str
    caller: _Measured | None
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    has_bad_input: bool = False


def running_call() -> ModelCall | None:
    """Return the innermost call of a module that runs in this thread, from the Python stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    if frame is None:
        return None
    found = frame.f_locals
    model = found["self"]
    devices = {"cpu", *(parameter.device.type for parameter in model.parameters())}
    autocast = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in sorted(devices)
        if torch.is_autocast_enabled(device)
    )
    return ModelCall(model, found["args"], found["kwargs"], autocast)


def find_nonfinite_call(call: ModelCall) -> tuple[str, str | None] | None:
    """Repeat a call; return the first module whose output is not finite, or None.

    If its input was not finite already, the second name is that of the module whose own code made
    it so: its inputs were finite. Names are those of the model without wrappers; the model itself
    is "". This waits for the device once.
    """
    copy, parameters = copy_sharing_parameters(call.model)
    ended = _measure_calls(copy)
    _run(copy, call, parameters)
    values = iter(read_tensors(x for one in ended for x in (*one.inputs, *one.outputs)))
    first: _Measured | None = None
    for one in ended:
        inputs = [next(values) for _ in one.inputs]
        outputs = [next(values) for _ in one.outputs]
        one.has_bad_input = not all(map(math.isfinite, inputs))
        if first is None and not all(map(math.isfinite, outputs)):
            first = one
    if first is None:
        return None
    origin: _Measured | None = first
    while origin is not None and origin.has_bad_input:
        origin = origin.caller
    return first.module, None if origin is None or origin is first else origin.module


def copy_sharing_parameters(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    """Return a copy of a model without its wrappers, and the parameters that both have.

    Raises:
        CannotRepeatError: the parameters are sharded, or the model cannot be copied.
    """
    model = unwrap_module(model)
    parameters = list(model.parameters())
    is_fsdp = any(
        is_fsdp_module(module) or type(module).__name__ == "FullyShardedDataParallel"
        for module in model.modules()
    )
    if is_fsdp or any(map(is_sharded, parameters)):
        raise CannotRepeatError("its parameters are sharded over processes")
    try:
        copy = deepcopy(model, {id(parameter): parameter for parameter in parameters})
    except Exception as error:
        raise CannotRepeatError(f"it cannot be copied ({type(error).__name__}: {error})") from error
    return copy, parameters


@contextmanager
def only_compute(call: ModelCall, parameters: list[nn.Parameter]) -> Generator[None, None, None]:
    """Compute as in a call, and raise if that would change parameters or reach other processes."""
    try:
        with ExitStack() as contexts:
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
            for kind, dtype in call.autocast:
                contexts.enter_context(torch.autocast(kind, dtype))
            contexts.enter_context(_OnlyCompute(parameters))
            yield
    except CannotRepeatError:
        raise
    except Exception as error:
        raise CannotRepeatError(f"it failed ({type(error).__name__}: {error})") from error


def _measure_calls(model: nn.Module) -> list[_Measured]:
    """Register hooks that measure each call of a module, and append it when it ends."""
    ended: list[_Measured] = []
    running: list[_Measured] = []

    def before(module: nn.Module, args: Any, kwargs: Any, name: str) -> None:
        caller = running[-1] if running else None
        running.append(_Measured(name, caller, _extremes_in((args, kwargs))))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        measured = running.pop()
        measured.outputs = _extremes_in(output)
        ended.append(measured)

    for name, module in model.named_modules():
        see = partial(before, name=name)
        module.register_forward_pre_hook(see, prepend=True, with_kwargs=True)
        # Also after an exception, which the model may catch.
        module.register_forward_hook(after, always_call=True)
    return ended


def _extremes_in(values: Any) -> list[torch.Tensor]:
    pairs = [extremes(tensor) for tensor in tensors_in(values)]
    return [extreme for pair in pairs if pair is not None for extreme in pair]


def _run(copy: nn.Module, call: ModelCall, parameters: list[nn.Parameter]) -> None:
    tensors = [*parameters, *tensors_in((call.args, call.kwargs))]
    states = [
        (device, random_state(device))
        for device in dict.fromkeys((torch.device("cpu"), *(tensor.device for tensor in tensors)))
    ]
    try:
        args, kwargs = map_tensors((call.args, call.kwargs), lambda x: x.detach().clone())
        with torch.no_grad(), only_compute(call, parameters):
            copy(*args, **kwargs)
    finally:
        for device, state in states:
            restore_random_state(state, device)


class _OnlyCompute(TorchDispatchMode):
    """Raises before an operation that changes a parameter or communicates with other processes."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {parameter.untyped_storage()._cdata for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "c10d" in func.namespace:
            raise CannotRepeatError("it communicates with other processes")
        for i, name in _written_by(func):
            written = args[i] if i < len(args) else kwargs.get(name)
            if any(map(self._is_parameter, tensors_in(written))):
                raise CannotRepeatError("it changes parameters")
        return func(*args, **kwargs)

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


@cache
def _written_by(operation: Any) -> tuple[tuple[int, str], ...]:
    """Return the places and names of the arguments that an operation changes."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
