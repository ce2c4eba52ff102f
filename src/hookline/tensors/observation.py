"""What observers get: detached tensors, and a look afterwards whether these were left alone.

An in-place operation by an observer is seen by the tensor's version, a random number that it drew
by the generators' states: torch's; and Python's and NumPy's, while no other thread may have drawn.
Either would silently change training, so either ends it, with a name.
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

_MT19937 = 625 * 4  # bytes: its 624 numbers, and where it stands among them


class Observation:
    """One moment that observers look at.

    Args:
        seen: what there is to be seen; tensors anywhere in it are handed over detached.
        what: what it is, for messages.
    """

    def __init__(self, seen: Any, what: str) -> None:
        self._seen = seen
        self._what = what

    @cached_property
    def activations(self) -> Any:
        """What there is to be seen, detached; made once."""
        return map_tensors(self._seen, torch.Tensor.detach)

    def carry(
        self,
        hook: Hook,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Let an observer look; raise `ObserverError` when it did more."""
        tensors = [tensor for tensor in tensors_in(self._seen) if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        generators = [_generator(device) for device in {t.device for t in tensors}]
        generators.append(torch.default_generator)
        states = [generator.get_state() for generator in generators]
        # Another thread, such as a loader's, may draw from Python's and NumPy's at the same time.
        alone = threading.active_count() == 1
        others = _other_states() if alone else None
        try:
            returned = call(*args, **kwargs)
        finally:
            if [tensor._version for tensor in tensors] != versions:
                raise ObserverError(
                    f"{_name(hook)} changed {self._what} in place, but it only observes: training "
                    "would not be the same without it. Work on a copy: `activations.clone()`."
                )
            drawn = zip(generators, states, strict=True)
            same = all(torch.equal(generator.get_state(), state) for generator, state in drawn)
            if not same or (alone and _other_states() != others):
                raise ObserverError(
                    f"{_name(hook)} drew from training's random numbers, but it only observes: "
                    "training would not be the same without it. Give it a generator of its own: "
                    "`torch.Generator().manual_seed(0)`, `random.Random(0)` or "
                    "`numpy.random.default_rng(0)`."
                )
        if returned is not None:
            raise TypeError(
                f"{_name(hook)} returned a {type(returned).__name__}. It observes, so what it "
                "returns would be lost: return nothing."
            )


def _generator(device: torch.device) -> torch.Generator:
    """The generator that training draws from there; reading its state waits for nothing."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _other_states() -> tuple[Any, ...]:
    """The states of Python's generator, and of NumPy's where it is in use."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.getstate(),)
    generator = numpy.get_bit_generator()
    if type(generator).__name__ == "MT19937":
        # Its memory: `generator.state` is put together number by number, which takes 70 µs.
        return random.getstate(), string_at(generator.ctypes.state_address, _MT19937)
    return random.getstate(), repr(generator.state)


def _name(hook: Hook) -> str:
    function = hook.hookline_function
    return getattr(function, "__qualname__", None) or type(hook).__qualname__
