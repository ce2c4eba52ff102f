"""Calling observers with detached tensors, and checking that they changed nothing.

An in-place operation is detected by the tensor's version in every call. Writes that do not count as
one (through `.data` or NumPy) are detected by fingerprints of the memory in an observer's first
calls, and then in every hundredth. Both would silently change training, so they raise an error that
names the observer. Random numbers that it took from a global generator (torch's, and Python's and
NumPy's if no other thread may have used them) are put back.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from ctypes import memmove, string_at
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hookline.errors import ArgumentError, ObserverError, RandomNumberError
from hookline.hook import Hook
from hookline.tensors.fingerprints import Comparison, Fingerprint
from hookline.tensors.nested import map_tensors, tensors_in

FIRST_CALLS = 3
"""The number of first calls of an observer in which memory is compared."""

EVERY_CALLS = 100
"""Then memory is compared once in this many calls."""

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
        """Call an observer.

        Raise `ObserverError` if it changed tensors, and `RandomNumberError` if it used a global
        random number generator, which then has its former state.
        """
        history = _history(hook)
        if history.has_changed_memory():
            raise self._change_error(hook)
        compares = history.calls < FIRST_CALLS or history.calls % EVERY_CALLS == 0
        history.calls += 1
        tensors = list(tensors_in(self._value))
        versioned = [tensor for tensor in tensors if not tensor.is_inference()]
        versions = [tensor._version for tensor in versioned]
        before = Fingerprint(tensors) if compares else None
        generators = _GlobalGenerators({tensor.device for tensor in tensors}, exact=compares)
        try:
            returned = call(*args, **kwargs)
        finally:
            if before is not None:
                history.comparisons.append(Comparison(before, Fingerprint(tensors)))
            changed_version = [tensor._version for tensor in versioned] != versions
            if changed_version or any(c.differs_on_cpu for c in history.comparisons):
                history.comparisons.clear()
                raise self._change_error(hook)
            if generators.restore():
                raise RandomNumberError(
                    f"{_name(hook)} used a global random number generator, but it only observes: "
                    "it must not change training. The generator's state was restored. Use a "
                    "separate generator: `torch.Generator().manual_seed(0)`, `random.Random(0)` or "
                    "`numpy.random.default_rng(0)`."
                )
        if returned is not None:
            raise ArgumentError(
                f"{_name(hook)} returned a {type(returned).__name__}, but what an observer "
                "returns is not used. Return None."
            )

    def _change_error(self, hook: Hook) -> ObserverError:
        return ObserverError(
            f"{_name(hook)} changed {self._description} in place, but it only observes: it "
            "must not change training. Work on a copy: `activations.clone()`."
        )


@dataclass
class _History:
    """The calls of one observer, and comparisons that a device may not have finished."""

    calls: int = 0
    comparisons: list[Comparison] = field(default_factory=list)

    def has_changed_memory(self) -> bool:
        """Return whether an earlier call changed memory of a device, and drop what is known."""
        known = [comparison for comparison in self.comparisons if not comparison.is_pending]
        self.comparisons = [c for c in self.comparisons if c.is_pending]
        return any(comparison.differs_on_devices for comparison in known)


_histories: dict[int, _History] = {}


def _history(hook: Hook) -> _History:
    observer = hook if hook.hookline_function is None else hook.hookline_function
    history = _histories.get(id(observer))
    if history is None:
        history = _History()
        try:
            weakref.finalize(observer, _histories.pop, id(observer), None).atexit = False
        except TypeError:  # it cannot be referenced weakly: treat each call as the first
            return history
        _histories[id(observer)] = history
    return history


def _name(hook: Hook) -> str:
    function = hook.hookline_function
    return getattr(function, "__qualname__", None) or type(hook).__qualname__


class _GlobalGenerators:
    """The states of the global random number generators.

    Python's and NumPy's are included if no other thread, such as a loader's, may use them
    meanwhile. Hookline's own threads do not. With `exact`, NumPy's state includes a number that it
    keeps for the next call of `randn`; reading that takes 70 µs.
    """

    def __init__(self, devices: Iterable[torch.device], *, exact: bool) -> None:
        generators = [torch.default_generator, *map(_generator, devices)]
        self._states = [(generator, generator.get_state()) for generator in generators]
        self._numpy: Any = sys.modules.get("numpy.random")
        self._exact = exact
        self._is_single_thread = threading.active_count() == 1 or not any(
            thread is not threading.current_thread() and not thread.name.startswith("hookline")
            for thread in threading.enumerate()
        )
        if self._is_single_thread:
            self._python = random.getstate()
            self._numpy_state = self._read_numpy()

    def restore(self) -> bool:
        """Restore generators that were used since; return whether there are any."""
        used = False
        for generator, state in self._states:
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)
                used = True
        if not self._is_single_thread:
            return used
        if random.getstate() != self._python:
            random.setstate(self._python)
            used = True
        if self._numpy is not None and not _equal(self._read_numpy(), self._numpy_state):
            self._write_numpy()
            used = True
        return used

    def _read_numpy(self) -> Any:
        if self._numpy is None:
            return None
        generator = self._numpy.get_bit_generator()
        if self._exact or type(generator).__name__ != "MT19937":
            return self._numpy.get_state(legacy=False)
        return string_at(generator.ctypes.state_address, _MT19937_BYTES)

    def _write_numpy(self) -> None:
        if isinstance(self._numpy_state, bytes):
            address = self._numpy.get_bit_generator().ctypes.state_address
            memmove(address, self._numpy_state, _MT19937_BYTES)
        else:
            self._numpy.set_state(self._numpy_state)


def _generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device; reading its state does not wait."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _equal(a: Any, b: Any) -> bool:
    """Compare states of NumPy: bytes, or nested mappings with arrays."""
    if isinstance(a, dict):
        return all(_equal(value, b[key]) for key, value in a.items())
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)
