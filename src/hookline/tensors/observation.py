"""Calling observers with detached tensors, and checking that they changed nothing.

An in-place operation is detected by the tensor's version, the use of random numbers by the state of
the generators: torch's, and Python's and NumPy's if no other thread may have used them. Either
would silently change training, so either raises an error that names the observer.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Mapping
from ctypes import string_at
from functools import cached_property
from typing import Any

import torch

from hookline.errors import ObserverError
from hookline.hook import Hook
from hookline.tensors.nested import map_tensors, tensors_in

__all__ = ["Observation"]

_MT19937_BYTES = 625 * 4  # its 624 words and the position


class Observation:
    """A value that observers get with detached tensors. `description` is for messages."""

    def __init__(self, value: Any, description: str) -> None:
        self._value = value
        self._description = description

    @cached_property
    def activations(self) -> Any:
        """The value with detached tensors; created once."""
        return map_tensors(self._value, torch.Tensor.detach)

    def carry(
        self,
        hook: Hook,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Call an observer; raise `ObserverError` if it changed tensors or used random numbers."""
        tensors = [tensor for tensor in tensors_in(self._value) if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        generators = [_generator(device) for device in {t.device for t in tensors}]
        generators.append(torch.default_generator)
        states = [generator.get_state() for generator in generators]
        # Another thread, such as a loader's, may use Python's and NumPy's generators meanwhile.
        single_thread = threading.active_count() == 1
        others = _other_states() if single_thread else None
        try:
            returned = call(*args, **kwargs)
        finally:
            if [tensor._version for tensor in tensors] != versions:
                raise ObserverError(
                    f"{_name(hook)} changed {self._description} in place, but it only observes: it "
                    "must not change training. Work on a copy: `activations.clone()`."
                )
            pairs = zip(generators, states, strict=True)
            unused = all(torch.equal(generator.get_state(), state) for generator, state in pairs)
            if not unused or (single_thread and _other_states() != others):
                raise ObserverError(
                    f"{_name(hook)} used a global random number generator, but it only observes: "
                    "it must not change training. Use a separate generator: "
                    "`torch.Generator().manual_seed(0)`, `random.Random(0)` or "
                    "`numpy.random.default_rng(0)`."
                )
        if returned is not None:
            raise TypeError(
                f"{_name(hook)} returned a {type(returned).__name__}, but what an observer "
                "returns is not used. Return None."
            )


def _generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device; reading its state does not wait."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _other_states() -> tuple[Any, ...]:
    """Return the state of Python's generator, and of NumPy's if it was imported."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.getstate(),)
    generator = numpy.get_bit_generator()
    if type(generator).__name__ == "MT19937":
        # Its memory, because building `generator.state` takes 70 µs.
        return random.getstate(), string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return random.getstate(), repr(generator.state)


def _name(hook: Hook) -> str:
    function = hook.hookline_function
    return getattr(function, "__qualname__", None) or type(hook).__qualname__
