"""Extracts tensors and their gradients: a part, in another dtype or on another device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookline.arguments import show_value
from hookline.errors import ConfigError, HookFailedError, ProbeError, nearest
from hookline.hook import Hook
from hookline.probes.store import Store, shape_text
from hookline.tensors.nested import map_tensors
from hookline.tensors.observation import Observation


class TensorExtractor:
    """Extracts tensors as the options of `Capture` say; the probe is for messages."""

    def __init__(
        self,
        probe: Hook,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        select: Any = None,
    ) -> None:
        self._probe = probe
        try:
            self._device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"device: {str(error).splitlines()[0]}") from error
        self._dtype = _parse_dtype(dtype) if isinstance(dtype, str) else dtype
        is_index = select is not None and not callable(select)
        self._select = parse_index(select, "select") if is_index else select
        self.copies_only = device is None and dtype is None and select is None
        """Whether tensors are copied as they are."""

    def extract(self, value: Any, name: str) -> Any:
        """Return a value with the extracted tensors."""
        if self.copies_only:
            return map_tensors(value, lambda tensor: tensor.detach().clone())
        return map_tensors(value, lambda tensor: self._extract_or_explain(tensor, name))

    def _extract_or_explain(self, tensor: Tensor, name: str) -> Tensor:
        try:
            return self._extract_tensor(tensor, name)
        except (HookFailedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ProbeError(
                f"'{name}' has a tensor, {shape_text(tensor)}, that the options do not fit: "
                f"{type(error).__name__}: {error}. Use a function for `select` that handles it, or "
                "choose other modules."
            ) from error

    def _extract_tensor(self, tensor: Tensor, name: str) -> Tensor:
        part = source = tensor.detach()
        if callable(self._select):
            part = call_user_function(self._select, part, f"a tensor of '{name}'", self._probe)
            if not isinstance(part, Tensor):
                raise TypeError(f"select returned a {type(part).__name__}, not a tensor")
            part = part.detach()
        elif self._select is not None:
            part = part[self._select]
        if self._dtype is not None and part.is_floating_point():
            part = part.to(self._dtype)
        if self._device is not None:
            part = part.to(self._device)
        return part.clone() if _shares_memory(part, source) else part


def call_user_function(
    function: Callable[..., Any], tensor: Tensor, subject: str, probe: Hook | None = None
) -> Any:
    """Return what a function returns for a tensor, detached; raise if it changed the tensor.

    `subject` is what the tensor is, for messages. They name the function, or the probe if given.
    """
    observation, returned = Observation(tensor, subject), list[Any]()
    if probe is None:
        probe = Hook()
        probe.hookline_function = function
    observation.carry(probe, lambda: returned.append(function(observation.activations)), (), {})
    return returned[0]


def _shares_memory(tensor: Tensor, source: Tensor) -> bool:
    """Return whether they share memory; True if that is not known."""
    if tensor is source:
        return True
    try:
        return tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return True


def _parse_dtype(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        names = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
        raise ConfigError(f"dtype: torch has no dtype {show_value(dtype)}.{nearest(dtype, names)}")
    return found


def parse_index(index: Any, option: str) -> Any:
    """Return an index into a tensor, also from text: `":, -1"` in a config file is `x[:, -1]`.

    `option` is the option's name, for the `ConfigError` that is raised if it is not an index.
    """
    if isinstance(index, str):
        parts = (part.strip() for part in index.strip("[] ").split(","))
        return tuple(_parse_part(part, f"{option}={show_value(index)}") for part in parts)
    for part in index if isinstance(index, tuple) else (index,):
        if not (
            isinstance(part, int | slice | list | torch.Tensor) or part is Ellipsis or part is None
        ):
            raise ConfigError(
                f"{option}={show_value(index)} is not an index. Give a number, a slice, a list "
                "of numbers, a mask, a tuple of these, or text such as ':, -1'."
            )
    return index


def _parse_part(part: str, option: str) -> Any:
    if part == "...":
        return Ellipsis
    try:
        numbers = [int(number) if number.strip() else None for number in part.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if 2 <= len(numbers) <= 3:
        return slice(*numbers)
    raise ConfigError(
        f"{option} is not an index: {show_value(part)} is neither a number nor a slice."
    )


# -- gradients in backward -------------------------------------------------------------------------


def on_gradient(tensor: Tensor, callback: Callable[[Tensor], None]) -> None:
    """Call a function with the gradient of a tensor, in each backward that reaches it.

    A leaf, such as a parameter, is ignored: its hook would never be freed, and its gradient is that
    of all its uses. Only the graph keeps what this registers, so it is freed with the graph.
    """
    if tensor.grad_fn is None:
        return
    base, shape = tensor._base, tensor.shape
    if base is None or not _is_view_of_linear(tensor, base):
        # The gradient is None for an output of an operation that nothing used.
        tensor.register_hook(lambda gradient: None if gradient is None else callback(gradient))
        return
    # A linear layer returns a view for a sequence. An in-place change of it, as by an activation,
    # rebuilds its graph from the base on, and the view's hook misses what comes after the change.
    # Nothing else uses the base, so then its gradient is that of the view.
    counter = tensor.detach()  # shares the version counter but, after the next line, not the memory
    counter.data = tensor.new_empty(0)
    version = counter._version

    def on_view(gradient: Tensor | None) -> None:
        if gradient is not None and counter._version == version:
            callback(gradient)

    def on_base(gradient: Tensor | None) -> None:
        if gradient is not None and counter._version != version:
            callback(gradient.reshape(shape))

    tensor.register_hook(on_view)
    base.register_hook(on_base)


def _is_view_of_linear(view: Tensor, base: Tensor) -> bool:
    """Return whether a linear layer made the view, so that nothing else uses its base."""
    view_fn, base_fn = view.grad_fn, base.grad_fn
    return (
        view_fn is not None
        and base_fn is not None
        and view_fn.name() in ("ViewBackward0", "UnsafeViewBackward0")
        and view_fn.next_functions[0][0] is base_fn
        and base_fn.name() == "AddmmBackward0"
    )


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """Takes the place of a tensor whose gradient is expected."""

    tensor_id: int


@dataclass(slots=True, eq=False)
class OutputGradients:
    """The gradients of one output, which are added to the state of its call in backward."""

    name: str  # the module's
    extractor: TensorExtractor
    store: Store
    key: int  # the state's key in the store
    guard: Callable[..., Any]
    structure: Any = None  # of the output, with placeholders
    gradients: dict[int, Any] = field(default_factory=dict[int, Any])
    lock: threading.Lock = field(default_factory=threading.Lock)  # backward has several threads

    def expect(self, output: Any) -> None:
        """Wait for the gradients of the tensors in what a module returned."""

        def expect_of(tensor: Tensor) -> _Placeholder:
            on_gradient(tensor, partial(self.guard, self._add, id(tensor)))
            return _Placeholder(id(tensor))

        self.structure = map_tensors(output, expect_of)

    def _add(self, tensor_id: int, gradient: Tensor) -> None:
        """Add the gradient of one tensor; those that are not there yet are None."""
        with self.lock:
            self.gradients[tensor_id] = self.extractor.extract(gradient, self.name)
            gradients = map_tensors(
                self.structure, lambda p: self.gradients.get(p.tensor_id), leaf=_Placeholder
            )
            if not self.store.add_gradient(self.key, gradients):
                self.gradients.clear()  # the state was dropped: free what cannot be read
