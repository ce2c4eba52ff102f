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
        return self._run(args, kwargs)

    def run(self, seed: int = 0) -> Any:
        """Return what the model returns in eval mode, starting with random numbers of a seed."""
        return self._run(self.args, self.kwargs, seed)

    def _run(self, args: Any, kwargs: Any, seed: int = 0) -> Any:
        """Call a new copy of the model.

        Raises:
            CannotRepeatError: it cannot be called without an effect on training, or fails.
        """
        model, parameters = self._copy()
        with self._apart(seed), only_compute(self._call, parameters):
            return model.eval()(*args, **kwargs)

    def ignores(self, layer: torch.nn.Module) -> Tensor | None:
        """Return whether a layer's output stays the same when its weight changes, in a copy.

        The layer is called twice before the change, as caches are made then. None if it was not
        called, or equal calls differ in shape.
        """
        names = {id(m): name for name, m in unwrap_module(self._call.model).named_modules()}
        model, parameters = self._copy()
        own: Any = dict(model.named_modules()).get(names.get(id(layer), "-"))
        if own is None:
            return None
        outputs: list[list[Any]] = [[], [], []]
        own.weight = torch.nn.Parameter(own.weight.detach().clone(), False)
        for i, seen in enumerate(outputs):
            handle = own.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out))
            with self._apart(), only_compute(self._call, parameters):
                if i == 2:
                    values = torch.linspace(-1.5, 1.5, own.weight.numel()).to(own.weight)
                    own.weight.copy_(values.view_as(own.weight))
                model.train()(*self.args, **self.kwargs)
            handle.remove()
        if not all(seen and isinstance(seen[0], Tensor) for seen in outputs):
            return None
        one, two, three = (seen[0] for seen in outputs)
        if one.shape != three.shape or not one.numel() or not one.is_floating_point():
            return None
        is_same = (two - three).abs().max() <= 1e-4 * two.abs().max()
        is_ignored: Tensor = (one == two).all() & is_same & (two != 0).any()
        return is_ignored

    def _copy(self) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
        """Return a copy of the model, without hooks, that shares the parameters returned."""
        _check_memory(self.device)
        model, parameters = copy_sharing_parameters(self._call.model)
        _drop_hooks(model)
        return model, parameters

    @contextmanager
    def _apart(self, seed: int = 0) -> Generator[None, None, None]:
        """Draw random numbers of a generator that is put back afterwards."""
        devices = {torch.device("cpu"), self.device}
        states = [(device, random_state(device)) for device in devices]
        try:
            _seed(devices, seed)
            with torch.no_grad():
                yield
        finally:
            for device, state in states:
                restore_random_state(state, device)


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
