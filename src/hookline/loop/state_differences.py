"""Why the objects of a loop cannot load a saved state, found without changing them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hookline.checkpoint.differences import MAX_SHOWN, limit_lines, shape_of
from hookline.errors import listed

_PLAIN = {  # optimizers of torch whose states have the shapes of parameters, apart from scalars
    *("Adam", "AdamW", "RAdam", "NAdam", "Adamax", "Adagrad", "Adadelta"),
    *("RMSprop", "Rprop", "ASGD", "SGD"),
}
_DIVISORS = {
    *("step_size", "step_ratio", "total_steps", "total_size"),
    *("T_max", "T_0", "T_i", "T_mult"),
}
_PER_GROUP = ("base_lrs", "_last_lr")  # a scheduler has one for each group of its optimizer
_SCALARS = ("step", "mu_product", "eta", "mu")
_KINDS = (
    (bool, "a boolean"),
    ((int, float), "a number"),
    (str, "a text"),
    ((list, tuple), "a list"),
    (Mapping, "a mapping"),
    (torch.Tensor, "a tensor"),
)
_INT64_LIMIT = 1 << 63
_FLOAT32_MAX = torch.finfo(torch.float32).max


def compare_objects(
    kind: str, here: Sequence[Any], saved: Sequence[Any], classes: Mapping[str, Sequence[str]]
) -> dict[int, list[str]]:
    """Return what the optimizers or schedulers of a loop cannot load, by index; -1: their number.

    Args:
        kind: "optimizer" or "scheduler".
        here: the objects.
        saved: their states in a checkpoint.
        classes: the names of the classes that they had there, as far as it has them.
    """
    found: dict[int, list[str]] = {}
    if len(saved) != len(here):
        are = "is" if len(here) == 1 else "are"
        found[-1] = [f"the checkpoint has {_count(saved, kind)}, and here {are} {len(here)}"]
    names = classes.get(f"{kind}s", ())
    for index, (own, state) in enumerate(zip(here, saved, strict=False)):
        name = f"{kind} {index}"
        lines = describe_class(name, own, names[index] if index < len(names) else None)
        if kind == "optimizer":
            lines += describe_optimizer(name, own, state)
        elif not lines:
            lines += [f"{name}: {line}" for line in _describe_scheduler(own, state)][:MAX_SHOWN]
        found[index] = lines
    return found


def describe_class(name: str, own: Any, saved: str | None) -> list[str]:
    """Return a line if an object had another class when it was saved; None: it is not known."""
    kind = type(own).__name__
    is_same = saved is None or saved == kind
    return [] if is_same else [f"{name} is {saved} in the checkpoint and {kind} here"]


def compare_scaler(scaler: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return what the gradient scaler cannot load; nothing if there is none."""
    own = {} if scaler is None else scaler.state_dict()
    lines = _describe_kinds(saved, own)
    lines += [f"'{key}' is missing" for key in own if key not in saved]
    return [f"the scaler: {line}" for line in lines][:MAX_SHOWN]


# -- hooks ----------------------------------------------------------------------------------------


def describe_hook_names(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return which hooks have no saved state, and which saved states have no hook."""
    missing = [name for name in here if name not in saved]
    orphaned = [name for name in saved if name not in here]
    texts = ("the checkpoint has no state of these hooks", "saved states without a hook")
    pairs = zip(texts, (missing, orphaned), strict=True)
    return [f"{text}: {listed(names, MAX_SHOWN)}" for text, names in pairs if names]


def describe_hook_states(hooks: Any, saved: Mapping[str, Any], model: torch.nn.Module) -> list[str]:
    """Return what built-in hooks cannot load: values of another kind, averages of other weights."""
    from hookline.options import BuiltIn  # pydantic takes long to import

    lines: list[str] = []
    own = hooks.state_dict()
    weights = {
        name.replace("_orig_mod.", ""): tensor
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    for name in [name for name in own if name in saved]:
        if isinstance(hooks.get_hook(name), BuiltIn):
            found = _describe_kinds(saved[name], own[name])
            averages = saved[name].get("averages")
            if isinstance(averages, Mapping):
                found += [
                    f"'{key}' of the averages is not that of a weight of the model"
                    for key, value in averages.items()
                    if key not in weights or not _has_shape(value, weights[key])
                ]
            lines += [f"hook '{name}': {line}" for line in found]
    return lines[:MAX_SHOWN]


def _has_shape(value: Any, weight: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and (is_lazy(weight) or value.shape == weight.shape)


# -- optimizers -----------------------------------------------------------------------------------


def describe_optimizer(name: str, optimizer: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return what one optimizer cannot load: other groups, options or states of parameters."""
    before, now = saved["param_groups"], optimizer.param_groups
    if len(before) != len(now):
        count = _count(before, "parameter group")
        return [f"{name} has {count} in the checkpoint and {len(now)} here"]
    lines = [
        f"{name}: group {index} {line}"
        for index, groups in enumerate(zip(before, now, strict=True))
        for line in _describe_group(*groups)
    ]
    if not lines:
        states = [f"{name}: {line}" for line in _describe_parameter_states(optimizer, saved)]
        lines = limit_lines(states, "other states of parameters")
    return lines[: MAX_SHOWN + 1]


def _describe_group(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    if len(saved["params"]) != len(own["params"]):
        count = _count(saved["params"], "parameter")
        yield f"has {count} in the checkpoint and {len(own['params'])} here"
    before, now = saved.get("param_names") or (), own.get("param_names") or ()
    for first, second in zip(before, now, strict=False):
        if first != second:
            yield f"has '{first}' in the checkpoint where '{second}' is here"
            break
    options = {k: v for k, v in own.items() if k not in ("params", "param_names")}
    for line in _describe_kinds(saved, options):
        yield f"differs: {line}"
    for key, value in options.items():
        if saved.get(key) is None:
            if _kind(value) in ("a number", "a list"):
                yield f"has no '{key}'"
        elif isinstance(saved[key], torch.Tensor) and not isinstance(value, torch.Tensor):
            yield f"has a tensor '{key}' only in the checkpoint"
        elif not _is_usable(saved[key]):
            yield f"has '{key}' {saved[key]!s:.40}"
    decoupled = [one.get("decoupled_weight_decay") for one in (saved, own)]
    if set(map(type, decoupled)) == {bool} and decoupled[0] != decoupled[1]:
        yield "has another weight decay (Adam's or AdamW's)"


def _is_usable(value: Any) -> bool:
    """Return whether a number, or each one of a list, is finite, and not too large for torch."""
    if isinstance(value, list | tuple):
        return all(map(_is_usable, value))
    if type(value) is int:
        return abs(value) < _INT64_LIMIT
    return type(value) is not float or abs(value) <= _FLOAT32_MAX


def _describe_parameter_states(optimizer: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield which states do not have the shapes of the parameters, or of the states here."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in saved["param_groups"] for i in group["params"]]
    if len(set(indices)) != len(indices):
        yield "a parameter is in two groups"
        return
    by_index = dict(zip(indices, parameters, strict=True))
    kind = type(optimizer)
    is_torch = kind.__module__.startswith("torch.optim")
    is_plain = is_torch and kind.__name__ in _PLAIN
    group_of = {i: n for n, group in enumerate(saved["param_groups"]) for i in group["params"]}
    names: dict[int, set[str]] = {}  # by group: options such as amsgrad may differ
    for index, values in saved["state"].items():
        if type(index) is not int or index not in by_index or not isinstance(values, dict):
            if is_torch:
                yield f"the state of parameter {index!s:.40} is not valid"
            continue
        used = {key for key, value in values.items() if value is not None}
        if is_plain and used != names.setdefault(group_of[index], used):
            yield f"the state of parameter {index} has not the names of the others"
        own = optimizer.state.get(by_index[index], {})
        for key, value in values.items():
            here = own.get(key)
            has_other_shape = hasattr(here, "shape") and shape_of(value) != shape_of(here)
            if has_other_shape and hasattr(value, "shape"):
                shapes = f"{shape_of(value)} in the checkpoint and {shape_of(here)} here"
                yield f"'{key}' of parameter {index} is {shapes}"
            elif is_plain and not _fits(key, value, by_index[index]):
                yield f"'{key}' of parameter {index} does not have its shape"


def _fits(key: Any, value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value is None or a tensor with the shape of a parameter, or a scalar."""
    if not isinstance(value, torch.Tensor):
        is_number = type(value) in (int, float) and abs(value) < _INT64_LIMIT
        return value is None or (key in _SCALARS and is_number)
    if is_lazy(parameter):
        return True
    if value.is_complex() and not parameter.is_complex():
        return False
    return value.numel() == 1 if key in _SCALARS else value.shape == parameter.shape


# -- schedulers, and values by name ---------------------------------------------------------------


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
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return "a number"
    found = (name for types, name in _KINDS if isinstance(value, types))
    return next(found, f"a {type(value).__name__}")


def _count(items: Sequence[Any], what: str) -> str:
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"
