"""Why the objects of a loop cannot load a saved state, found without changing them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hookline.loop.random_state import describe_failure
from hookline.tensors.sharded import local, shard_like

_MAX_SHOWN = 5
_TRIED = {  # optimizers of torch whose next step can be tried with a saved state
    *("Adam", "AdamW", "RAdam", "NAdam", "Adamax", "Adagrad", "Adadelta"),
    *("RMSprop", "Rprop", "ASGD", "SGD"),
}
_DIVISORS = {
    *("step_size", "step_ratio", "total_steps", "total_size"),
    *("T_max", "T_0", "T_i", "T_mult"),
}
_PER_GROUP = ("base_lrs", "_last_lr")  # a scheduler has one for each group of its optimizer
_SCALARS = ("step", "mu_product", "eta", "mu")
_INT64_LIMIT = 1 << 63
_FLOAT32_MAX = torch.finfo(torch.float32).max


def compare_optimizers(optimizers: Sequence[Any], saved: Sequence[Any]) -> dict[int, list[str]]:
    """Return what optimizers cannot load, by index; if numbers differ, the first are compared."""
    return _compare_each("optimizer", describe_optimizer, optimizers, saved)


def compare_schedulers(schedulers: Sequence[Any], saved: Sequence[Any]) -> dict[int, list[str]]:
    """Return what schedulers cannot load, by index, as `compare_optimizers` does."""
    return _compare_each("scheduler", _describe_scheduler, schedulers, saved)


def _compare_each(
    kind: str,
    describe: Callable[[Any, Any], Iterable[str]],
    here: Sequence[Any],
    saved: Sequence[Any],
) -> dict[int, list[str]]:
    return {
        index: [f"{kind} {index}: {line}" for line in describe(*pair)][:_MAX_SHOWN]
        for index, pair in enumerate(zip(here, saved, strict=False))
    }


def compare_scaler(scaler: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return what the gradient scaler cannot load; nothing if there is none."""
    own = {} if scaler is None else scaler.state_dict()
    lines = _describe_kinds(saved, own)
    lines += [f"'{key}' is missing" for key in own if key not in saved]
    return [f"the scaler: {line}" for line in lines][:_MAX_SHOWN]


def describe_hook_states(hooks: Any, saved: Mapping[str, Any], model: torch.nn.Module) -> list[str]:
    """Return what built-in hooks cannot load: values of another kind, averages of other weights."""
    from hookline.options import BuiltIn  # pydantic takes long to import

    lines: list[str] = []
    own = hooks.state_dict()
    weights = {
        name.replace("_orig_mod.", ""): tensor
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    for name in hooks.list_hooks():
        if name not in saved or name not in own or not isinstance(hooks.get_hook(name), BuiltIn):
            continue
        found = _describe_kinds(saved[name], own[name])
        averages = saved[name].get("averages")
        if isinstance(averages, Mapping):
            found += _describe_averages(averages, weights)
        lines += [f"hook '{name}': {line}" for line in found]
    return lines[:_MAX_SHOWN]


def _describe_averages(
    averages: Mapping[Any, Any], weights: Mapping[str, torch.Tensor]
) -> list[str]:
    lines: list[str] = []
    for name, value in averages.items():
        if name not in weights:
            lines.append(f"the model has no weight '{name}', which has an average")
        elif not isinstance(value, torch.Tensor) or (
            not is_lazy(weights[name]) and value.shape != weights[name].shape
        ):
            lines.append(f"the average of '{name}' does not have the shape of the weight")
    return lines


def describe_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return what one optimizer cannot load."""
    lines = list(_describe_groups(optimizer, saved))
    if type(optimizer).__module__.startswith("torch.optim"):
        lines += _describe_parameter_states(optimizer, saved)
        if not lines and type(optimizer).__name__ in _TRIED:
            lines += describe_failure("its state", partial(_try_step, optimizer, saved))
    return lines


def _describe_groups(optimizer: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    for index, pair in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=False)):
        own, group = pair
        options = {k: v for k, v in own.items() if k not in ("params", "param_names")}
        for line in _describe_kinds(group, options):
            yield f"group {index}: {line}"
        for key, value in options.items():
            if key not in group and _is_checked(value):
                yield f"group {index} has no '{key}'"
        for key in options.keys() & group.keys():
            if isinstance(group[key], torch.Tensor) and not isinstance(options[key], torch.Tensor):
                yield f"group {index}: '{key}' is a tensor only in the checkpoint"
            elif not _is_usable(group[key]):
                yield f"group {index}: '{key}' is {group[key]!s:.40}"
        decoupled = [one.get("decoupled_weight_decay") for one in (group, own)]
        if set(map(type, decoupled)) == {bool} and decoupled[0] != decoupled[1]:
            yield f"group {index} has another weight decay (Adam's or AdamW's)"


def _is_checked(value: Any) -> bool:
    return _kind(value) in ("a number", "a list")


def _is_usable(value: Any) -> bool:
    """Return whether a number, or each one of a list, is finite, and not too large for torch."""
    if isinstance(value, list | tuple):
        return all(map(_is_usable, value))
    if type(value) is int:
        return abs(value) < _INT64_LIMIT
    return type(value) is not float or abs(value) <= _FLOAT32_MAX


def _describe_parameter_states(optimizer: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an optimizer of torch would fail on in its next step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in saved["param_groups"] for i in group["params"]]
    if len(parameters) != len(indices):
        return  # a difference that is listed elsewhere
    if len(set(indices)) != len(indices):
        yield "a parameter is in two groups"
    shapes = dict(zip(indices, parameters, strict=True))
    for index, values in saved["state"].items():
        if type(index) is not int or index not in shapes or not isinstance(values, dict):
            yield f"the state of parameter {index!s:.40} is not valid"
            continue
        for key, value in values.items() if type(optimizer).__name__ in _TRIED else ():
            if not _fits(key, value, shapes[index]):
                yield f"'{key}' of parameter {index} does not have its shape"


def _try_step(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Make a step of another optimizer with the saved options and states of a few parameters.

    They are the smallest of each group, one for each set of names that states have. Options such
    as `amsgrad` decide which names a step needs. Torch's constructor checks the numbers, such as
    `betas` below 0; it accepts no learning rate below 0, which a scheduler may have set.
    """
    if any(is_lazy(p) for group in optimizer.param_groups for p in group["params"]):
        return  # they have no shape yet
    kind, states = type(optimizer), saved["state"]
    accepted = inspect.signature(kind).parameters.keys() - {"params", "lr"}
    for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        chosen: dict[tuple[str, ...], tuple[int, Any]] = {}
        for index, parameter in zip(group["params"], own["params"], strict=False):
            values = states.get(index, {})
            names = tuple(sorted(key for key, value in values.items() if value is not None))
            if names not in chosen or parameter.numel() < chosen[names][1].numel():
                chosen[names] = index, parameter
        if not chosen:
            continue
        tried = dict(chosen.values())
        copies = [torch.zeros_like(local(parameter.detach())) for parameter in tried.values()]
        for one in copies:
            one.grad = torch.zeros_like(one)
        checked = {key: group[key] for key in accepted & group.keys() if _is_checked(group[key])}
        trial = kind(copies, lr=0.1, **checked)
        options = {**group, "params": list(tried)}
        options.pop("param_names", None)
        local_states = {i: _local_states(states[i], p) for i, p in tried.items() if i in states}
        trial.load_state_dict(copy.deepcopy({"state": local_states, "param_groups": [options]}))
        step: Any = kind.step
        getattr(step, "__wrapped__", step)(trial)  # unseen by the hooks of all optimizers


def _local_states(values: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return this rank's shards of a parameter's states, which may be whole."""
    return {
        key: local(shard_like(value, parameter))
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else value
        for key, value in values.items()
    }


def _fits(key: Any, value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value is None or a tensor with the shape of a parameter, or a scalar."""
    if not isinstance(value, torch.Tensor):
        return value is None or (
            key in _SCALARS and type(value) in (int, float) and abs(value) < _INT64_LIMIT
        )
    if is_lazy(parameter):
        return True
    if value.is_complex() and not parameter.is_complex():
        return False
    return value.numel() == 1 if key in _SCALARS else value.shape == parameter.shape


def _describe_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    own = scheduler.state_dict()
    for key in saved:  # a scheduler sets its attributes to these values
        if key not in own and (hasattr(type(scheduler), key) or key == "optimizer"):
            yield f"it cannot have a value '{key}'"
    yield from _describe_kinds(saved, own)
    for key in own.keys() & saved.keys():
        value = saved[key]
        is_zero = type(value) in (int, float) and value <= 0
        if (_is_usable(own[key]) and not _is_usable(value)) or (is_zero and key in _DIVISORS):
            yield f"'{key}' is {value!s:.40}"
        elif key in _PER_GROUP and isinstance(value, list) and len(value) != len(own[key]):
            yield f"'{key}' has {len(value)} values in the checkpoint and {len(own[key])} here"


def _describe_kinds(saved: Any, here: Any) -> list[str]:
    """Return which values of a mapping are of another kind than those with the same names here."""
    if not isinstance(saved, Mapping) or not isinstance(here, Mapping):
        same = isinstance(saved, Mapping) == isinstance(here, Mapping)
        return [] if same else [f"it is {_kind(saved)} in the checkpoint and {_kind(here)} here"]
    lines: list[str] = []
    for key, value in here.items():
        if key not in saved or None in (kinds := (_kind(saved[key]), _kind(value))):
            continue
        if kinds[0] != kinds[1]:
            lines.append(f"'{key}' is {kinds[0]} in the checkpoint and {kinds[1]} here")
        elif kinds[1] == "a list" and not _has_same_items(saved[key], value):
            lines.append(f"'{key}' has other values in the checkpoint than here")
    return lines


def _has_same_items(saved: Sequence[Any], here: Sequence[Any]) -> bool:
    """Return whether two lists have items of the same kinds; a tuple also has as many."""
    kinds = [{_kind(item) for item in items if item is not None} for items in (saved, here)]
    if isinstance(here, tuple) and len(saved) != len(here):
        return False
    return kinds[1] != {"a number"} or kinds[0] <= kinds[1]


def _kind(value: Any) -> str | None:
    """Return what kind of value it is, for messages; None for None."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return "a number"
    for types, name in (
        (str, "a text"),
        ((list, tuple), "a list"),
        (Mapping, "a mapping"),
        (torch.Tensor, "a tensor"),
    ):
        if isinstance(value, types):
            return name
    return f"a {type(value).__name__}"
