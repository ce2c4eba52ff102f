"""Why the objects of a loop cannot load a saved state, found without changing them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hookline.loop.random_state import describe_failure
from hookline.printable import printable
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
_CHECKED = ("a number", "a list")
_SCALARS = ("step", "mu_product", "eta", "mu")
_INT64_LIMIT = 1 << 63
_FLOAT32_MAX = torch.finfo(torch.float32).max


def compare_optimizers(optimizers: Sequence[Any], saved: Sequence[Any]) -> dict[int, list[str]]:
    """Return what optimizers cannot load, by index; if numbers differ, the first are compared."""
    return {
        index: [f"optimizer {index}: {line}" for line in _describe_optimizer(*pair)][:_MAX_SHOWN]
        for index, pair in enumerate(zip(optimizers, saved, strict=False))
    }


def compare_schedulers(schedulers: Sequence[Any], saved: Sequence[Any]) -> dict[int, list[str]]:
    """Return what schedulers cannot load, by index, as `compare_optimizers` does."""
    return {
        index: [f"scheduler {index}: {line}" for line in _describe_scheduler(*pair)][:_MAX_SHOWN]
        for index, pair in enumerate(zip(schedulers, saved, strict=False))
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
            lines.append(f"the model has no weight '{printable(name, 40)}', which has an average")
        elif not isinstance(value, torch.Tensor) or (
            not is_lazy(weights[name]) and value.shape != weights[name].shape
        ):
            shown = printable(name, 40)
            lines.append(f"the average of '{shown}' does not have the shape of the weight")
    return lines


def _describe_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    lines = list(_describe_groups(optimizer, saved))
    if type(optimizer).__module__.startswith("torch.optim"):
        lines += _describe_parameter_states(optimizer, saved)
        if not lines and type(optimizer).__name__ in _TRIED:
            lines += describe_failure("its state", partial(_try_step, optimizer, saved))
    yield from lines


def _describe_groups(optimizer: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    for index, pair in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=False)):
        own, group = pair
        options = {k: v for k, v in own.items() if k not in ("params", "param_names")}
        for line in _describe_kinds(group, options):
            yield f"group {index}: {line}"
        for key, value in options.items():
            if key not in group and _kind(value) in ("a number", "a list"):
                yield f"group {index} has no '{key}'"
        for key in options.keys() & group.keys():
            if isinstance(group[key], torch.Tensor) and not isinstance(options[key], torch.Tensor):
                yield f"group {index}: '{printable(key, 40)}' is a tensor only in the checkpoint"
            elif not _is_usable(group[key]):
                yield f"group {index}: '{printable(key, 40)}' is {printable(group[key], 40)}"
        decoupled = [one.get("decoupled_weight_decay") for one in (group, own)]
        if set(map(type, decoupled)) == {bool} and decoupled[0] != decoupled[1]:
            yield f"group {index} has another weight decay (Adam's or AdamW's)"


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
            yield f"the state of parameter {printable(index, 40)} is not valid"
            continue
        for key, value in values.items() if type(optimizer).__name__ in _TRIED else ():
            if not _fits(key, value, shapes[index]):
                yield f"'{printable(key, 40)}' of parameter {index} does not have its shape"


def _try_step(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Make a step of another optimizer with the saved options and states of a few parameters.

    They are the smallest of each group, one for each set of names that states have. Options such
    as `amsgrad` decide which names a step needs.
    """
    if any(is_lazy(p) for group in optimizer.param_groups for p in group["params"]):
        return  # they have no shape yet
    groups: list[dict[str, Any]] = []
    states: dict[int, Any] = {}
    tried: list[dict[str, Any]] = []
    for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        chosen: dict[tuple[str, ...], tuple[int, Any]] = {}
        for index, parameter in zip(group["params"], own["params"], strict=False):
            values = saved["state"].get(index, {})
            names = tuple(sorted(key for key, value in values.items() if value is not None))
            if names not in chosen or parameter.numel() < chosen[names][1].numel():
                chosen[names] = index, parameter
        own_parts = [local(parameter.detach()) for _, parameter in chosen.values()]
        copies = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in own_parts]
        for one in copies:
            one.grad = torch.zeros_like(one)
        tried.append({"params": copies})
        groups.append({**group, "params": [index for index, _ in chosen.values()]})
        groups[-1].pop("param_names", None)
        _construct(type(optimizer), copies, group)
        for index, parameter in chosen.values():
            if index in saved["state"]:
                states[index] = _local_states(saved["state"][index], parameter)
    trial = type(optimizer)(tried, lr=0.1)
    trial.load_state_dict(copy.deepcopy({"state": states, "param_groups": groups}))
    step: Any = type(trial).step
    getattr(step, "__wrapped__", step)(trial)  # unseen by the hooks of all optimizers


def _construct(kind: Any, parameters: list[torch.Tensor], group: Mapping[str, Any]) -> None:
    """Let torch's constructor check the numbers of a saved group, such as `betas` below 0.

    It accepts no learning rate below 0, which a scheduler may have set.
    """
    accepted = inspect.signature(kind).parameters.keys() - {"params", "lr"}
    options = {key: group[key] for key in accepted & group.keys()}
    numbers = {key: value for key, value in options.items() if _kind(value) in _CHECKED}
    kind(parameters, lr=0.1, **numbers)


def _local_states(values: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return this rank's parts of a parameter's states, which may be whole."""
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
            yield f"it cannot have a value '{printable(key, 40)}'"
    yield from _describe_kinds(saved, own)
    for key in own.keys() & saved.keys():
        name, value = printable(key, 40), saved[key]
        is_zero = type(value) in (int, float) and value <= 0
        if (_is_usable(own[key]) and not _is_usable(value)) or (is_zero and key in _DIVISORS):
            yield f"'{name}' is {printable(value, 40)}"
        elif key in _PER_GROUP and isinstance(value, list) and len(value) != len(own[key]):
            yield f"'{name}' has {len(value)} values in the checkpoint and {len(own[key])} here"


def _describe_kinds(saved: Any, here: Any) -> list[str]:
    """Return which values of a mapping are of another kind than those with the same names here."""
    if not isinstance(saved, Mapping) or not isinstance(here, Mapping):
        same = isinstance(saved, Mapping) == isinstance(here, Mapping)
        return [] if same else [f"it is {_kind(saved)} in the checkpoint and {_kind(here)} here"]
    lines: list[str] = []
    for key, value in here.items():
        if key not in saved or None in (kinds := (_kind(saved[key]), _kind(value))):
            continue
        name = printable(key, 40)
        if kinds[0] != kinds[1]:
            lines.append(f"'{name}' is {kinds[0]} in the checkpoint and {kinds[1]} here")
        elif kinds[1] == "a list" and not _has_same_items(saved[key], value):
            lines.append(f"'{name}' has other values in the checkpoint than here")
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
