"""The states of all random generators that training may use: saved, restored and checked."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

_CPU = torch.device("cpu")  # loaders draw nothing on other devices
_END = object()
_MT19937_LENGTH = 624
_HOLDERS = ("dataset", "sampler", "batch_sampler", "base_dataloader")  # of loaders and samplers


def seed_everything(seed: int) -> None:
    """Seed Python, numpy (if it is imported) and torch, on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all global generators."""
    state: dict[str, Any] = {
        "python": generator_state(random),
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = generator_state(numpy.random)
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states that `random_state` returned."""
    set_generator_state(random, state["python"])
    torch.set_rng_state(state["torch"].cpu())
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        set_generator_state(numpy.random, state["numpy"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)


def draw_apart(items: Iterator[Any], state: Mapping[str, Any]) -> Iterator[Any]:
    """Iterate over items that draw global random numbers on the CPU, in a sequence of their own.

    The sequence begins with a state of `random_state`. The global states are the same after each
    item as before it. Switching takes about 0.1 ms.
    """
    while True:
        outside = random_state(_CPU)
        restore_random_state(state, _CPU)
        try:
            item = next(items, _END)
        finally:
            state = random_state(_CPU)
            restore_random_state(outside, _CPU)
        if item is _END:
            return
        yield item


def loader_random_state(generators: Sequence[Any]) -> dict[str, Any]:
    """Return the states of the global generators on the CPU, and of a loader's own."""
    return {
        "random": random_state(_CPU),
        "generators": [generator_state(generator) for generator in generators],
    }


def restore_loader_random_state(state: Mapping[str, Any], generators: Sequence[Any]) -> None:
    """Restore the states that `loader_random_state` returned."""
    restore_random_state(state["random"], _CPU)
    for generator, saved in zip(generators, state["generators"], strict=True):
        set_generator_state(generator, saved)


def is_same_state(first: Any, second: Any) -> bool:
    """Return whether two states that `random_state` returned are equal."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and is_same_state(
            list(first.values()), list(second.values())
        )
    if isinstance(first, list):
        return len(first) == len(second) and all(map(is_same_state, first, second))
    return bool(first == second)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of torch, Python or numpy, or of Python's or numpy's module.

    Long states are returned as tensors, which are saved and loaded fast.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "getstate"):  # Python's
        version, internal, gauss = generator.getstate()
        return [version, torch.frombuffer(array("q", internal), dtype=torch.int64), gauss]
    if hasattr(generator, "get_state"):  # numpy's module or RandomState
        kind, keys, position, has_gauss, gauss = generator.get_state()
        return [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss]
    return generator.bit_generator.state


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore a state that `generator_state` returned.

    numpy does not check positions in the state, and would read behind its end: this does.
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif hasattr(generator, "setstate"):
        version, internal, gauss = state
        generator.setstate((version, tuple(internal.tolist()), gauss))
    elif hasattr(generator, "set_state"):
        kind, keys, position, *rest = state
        _check_position(position, _MT19937_LENGTH)
        generator.set_state((kind, keys.numpy(), position, *rest))
    else:
        own = generator.bit_generator.state
        if "pos" in own["state"]:
            _check_position(state["state"]["pos"], _MT19937_LENGTH)
        if "buffer_pos" in own:
            _check_position(state["buffer_pos"], len(own["buffer"]))
        generator.bit_generator.state = state


def _check_position(position: Any, length: int) -> None:
    if not 0 <= int(position) <= length:
        raise ValueError(f"its position is {position!r:.40}")


def generators_of(loaders: Iterable[Any]) -> list[Any]:
    """Return the generators of loaders, their samplers and datasets, without the global ones.

    Found are `torch.Generator`, `random.Random` and numpy's `Generator` and `RandomState`.
    """
    found: dict[int, Any] = {}
    for loader in loaders:
        _add_generators(loader, found, set())
    return list(found.values())


def _add_generators(holder: Any, found: dict[int, Any], seen: set[int]) -> None:
    seen.add(id(holder))
    if type(holder).__name__ == "SeedableRandomSampler":  # Accelerate's
        return  # it makes its generator in the first pass, and seeds it in every one
    for name, value in getattr(holder, "__dict__", {}).items():
        if isinstance(value, _generator_types()):
            found.setdefault(id(value), value)
            continue
        for inner in _inner_holders(name, value):
            if id(inner) not in seen:
                _add_generators(inner, found, seen)


def _generator_types() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    own = (torch.Generator, random.Random)
    return own if numpy is None else (*own, numpy.random.Generator, numpy.random.RandomState)


def _inner_holders(name: str, value: Any) -> Iterator[Any]:
    if name.lstrip("_") in _HOLDERS or isinstance(value, Sampler | Dataset):
        yield value
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Sampler | Dataset):
        yield from (each for each in value if isinstance(each, Sampler | Dataset))


def describe_random_state(state: Any) -> list[str]:
    """Return what is wrong with states of the global generators, if anything."""
    generators: dict[str, Any] = {"python": random.Random(), "torch": torch.Generator()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        generators["numpy"] = numpy.random.RandomState()
    lines: list[str] = []
    for name, generator in generators.items():
        lines += _describe_state(f"the random state of {name}", generator, state.get(name))
    return lines


def describe_generators(loaders: Sequence[Any], states: Sequence[Any]) -> list[str]:
    """Return which states do not fit the generators of these loaders; none if counts differ."""
    generators = generators_of(loaders)
    if len(generators) != len(states):
        return []
    lines: list[str] = []
    for index, (generator, state) in enumerate(zip(generators, states, strict=True)):
        lines += _describe_state(f"the state of generator {index} of the loaders", generator, state)
    return lines


def _describe_state(what: str, generator: Any, state: Any) -> list[str]:
    """Return a line if a new generator of the same type cannot have this state."""
    try:
        if isinstance(generator, torch.Generator):
            new: Any = torch.Generator(generator.device)
        elif hasattr(generator, "bit_generator"):
            new = type(generator)(type(generator.bit_generator)())
        else:
            new = type(generator)()
        set_generator_state(new, state)
    except Exception as error:  # whatever the libraries raise for a value of the wrong type
        return [f"{what} cannot be restored: {type(error).__name__}: {error}"]
    return []
