"""Calls of the model that active checks make again, without an effect on training.

The call runs on a copy of the model that shares its parameters, without anybody's hooks. Buffers,
gradients, modes and random states of training are not touched. An operation that would change a
parameter, or talk to other processes, ends the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from hookline.hooks.debugging.repeated_forward import (
    CannotRepeatError,
    ModelCall,
    copy_sharing_parameters,
    only_compute,
)
from hookline.loop.random_state import random_state, restore_random_state
from hookline.tensors.name_patterns import unwrap_module
from hookline.tensors.nested import map_tensors, tensors_in

_MIN_FREE = 0.2  # of an accelerator's memory


class RepeatableCall:
    """A training forward of an early step, with its inputs, that can be made again.

    Attributes:
        args: the inputs by position; tensors are copies.
        kwargs: the inputs by name.
        targets: what the loss functions of the step got as targets.
        shared: what one check has computed and another uses, by name.
    """

    def __init__(self, call: ModelCall, targets: list[Tensor]) -> None:
        self._call = call
        self.args, self.kwargs = map_tensors((call.args, call.kwargs), lambda x: x.detach().clone())
        self.targets = targets
        self.shared: dict[str, Any] = {}
        self._unchanged: _SharingCopy | None = None  # a copy that can be used again

    @property
    def device(self) -> torch.device:
        """The device of the first input, or of the model."""
        first = next(iter(tensors_in((self.args, self.kwargs))), None)
        if first is None:
            first = next(self._call.model.parameters())
        return first.device

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors among the arguments, by the names of `forward`, or by the keys of a batch."""
        forward = unwrap_module(self._call.model).forward
        try:
            named = inspect.signature(forward).bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            return {}
        found: dict[str, Tensor] = {}
        for name, value in named.items():
            parts = value if isinstance(value, Mapping) else {name: value}
            if isinstance(value, tuple | list):
                parts = {f"{name}[{i}]": each for i, each in enumerate(value)}
            found |= {str(key): x for key, x in parts.items() if isinstance(x, Tensor)}
        return found

    @cached_property
    def outputs(self) -> Any:
        """The outputs of the model for the inputs of the call, in eval mode."""
        return self.run()

    @cached_property
    def repeated_outputs(self) -> Any:
        """The same with other random numbers: where these differ, no comparison says anything."""
        return self.run(seed=1)

    def run_with(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Return what the model returns, in eval mode, for tensors that `change` returns."""
        args, kwargs = map_tensors((self.args, self.kwargs), change)
        return self.run(args, kwargs)

    def ignores(self, layer: torch.nn.Module) -> Tensor | None:
        """Return whether a layer's output stays the same when its weight changes, in a copy.

        The layer of the copy has a weight of its own, and is called before the change, too, as
        caches are made then. Each call ends behind the layer. None if the layer was not called, or
        two equal calls differ in shape.
        """
        modules = {id(m): name for name, m in unwrap_module(self._call.model).named_modules()}
        outputs: list[Tensor] = []
        with self._copy() as copy:
            model = copy.model
            own: Any = dict(model.named_modules()).get(modules.get(id(layer), "-"))
            if own is None:
                return None
            model.train()
            buffers = [(m, name, x) for m in model.modules() for name, x in m._buffers.items()]
            weight, handle = own.weight, own.register_forward_hook(_leave_forward)
            own.weight = torch.nn.Parameter(weight.detach().clone(), False)
            with torch.no_grad(), self._apart(), only_compute(self._call, copy.parameters):
                for i in range(3):
                    for module, name, buffer in buffers:
                        module._buffers[name] = None if buffer is None else buffer.clone()
                    _seed(self._devices, 0)
                    try:
                        model(*self.args, **self.kwargs)
                        break  # without the layer
                    except _LayerReached as reached:
                        outputs.append(reached.output)
                    if i == 1:
                        values = torch.linspace(-1.5, 1.5, own.weight.numel()).to(own.weight)
                        own.weight.copy_(values.view_as(own.weight))
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            own.weight = weight
            handle.remove()
        if len(outputs) < 3 or not all(isinstance(x, Tensor) for x in outputs):
            return None
        one, two, three = outputs
        if one.shape != three.shape or not one.numel() or not one.is_floating_point():
            return None
        is_same = (two - three).abs().max() <= 1e-4 * two.abs().max()
        return (one == two).all() & is_same & (two != 0).any()

    def run(
        self,
        args: Any = None,
        kwargs: Any = None,
        *,
        train: bool = False,
        gradients: bool = False,
        seed: int = 0,
    ) -> Any:
        """Return what the model returns for these inputs, by default those of the call.

        Calls with one seed start with the same random numbers, all with copies of the buffers.

        Raises:
            CannotRepeatError: it cannot be called without an effect on training, or fails.
        """
        _check_memory(self.device)
        args = self.args if args is None else args
        kwargs = self.kwargs if kwargs is None else kwargs
        with (
            self._copy() as copy,
            torch.set_grad_enabled(gradients),
            self._apart(seed),
            only_compute(self._call, copy.parameters),
        ):
            copy.model.train(train)
            return copy.model(*args, **kwargs)

    @contextmanager
    def _copy(self) -> Generator[_SharingCopy, None, None]:
        """Use a copy of the model that no call has changed; copying takes as long as a forward."""
        copy, self._unchanged = self._unchanged or _SharingCopy(self._call.model), None
        yield copy
        if copy.is_unchanged:
            self._unchanged = copy

    @property
    def _devices(self) -> set[torch.device]:
        return {torch.device("cpu"), self.device}

    @contextmanager
    def _apart(self, seed: int = 0) -> Generator[None, None, None]:
        """Draw random numbers of a generator that is put back afterwards."""
        states = [(device, random_state(device)) for device in self._devices]
        try:
            _seed(self._devices, seed)
            yield
        finally:
            for device, state in states:
                restore_random_state(state, device)


class _SharingCopy:
    """A copy of a model that shares its parameters, without the hooks of users.

    Attributes:
        model: the copy.
        parameters: those that both have.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.parameters = copy_sharing_parameters(model)
        _drop_hooks(self.model)
        self._before = self._describe()

    @property
    def is_unchanged(self) -> bool:
        """Whether calls have surely changed nothing but what each call sets."""
        return self._before is not None and self._before == self._describe()

    def _describe(self) -> list[Any] | None:
        """Return what all modules have; None if a call might change some of it in place."""
        try:
            return [
                [(name, _value_of(name, value)) for name, value in vars(module).items()]
                for module in self.model.modules()
            ]
        except TypeError:
            return None


_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"_parameters", "_buffers", "_modules"}
_CONSTANT = (
    *(int, float, str, bytes, type(None), torch.dtype, torch.device),
    *(type, FunctionType, BuiltinFunctionType),  # which no copy of a model has of its own
)


def _value_of(name: str, value: Any) -> Any:
    """Return what an attribute of a module is equal to while it is unchanged.

    Raises:
        TypeError: it might be changed without being replaced.
    """
    if name in _OF_MODULES:
        return None  # the mode, and hooks
    if name in ("_parameters", "_buffers", "_modules"):
        return [(key, id(x), getattr(x, "_version", 0)) for key, x in value.items()]
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, tuple) or type(value) is list:
        return [_value_of("", each) for each in value]
    raise TypeError(name)


class _LayerReached(BaseException):
    """Ends a forward behind a layer; code that handles exceptions does not see it."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def _leave_forward(module: torch.nn.Module, args: Any, output: Any) -> None:
    raise _LayerReached(output)


def _seed(devices: Iterable[torch.device], seed: int) -> None:
    """Seed the generators of these devices; `torch.manual_seed` would seed those of all others."""
    for device in devices:
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
            continue
        module: Any = torch.get_device_module(device)
        with module.device(device) if hasattr(module, "device") else nullcontext():
            module.manual_seed(seed)


def _drop_hooks(model: torch.nn.Module) -> None:
    """Remove hooks of users; those of torch compute weights (pruning, weight norm)."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                home = getattr(hook, "__module__", None) or type(hook).__module__
                if not home.startswith("torch."):
                    del hooks[key]


def _check_memory(device: torch.device) -> None:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < _MIN_FREE * total:
            raise CannotRepeatError(f"only {free >> 20} MiB of the device's memory are free")
