"""Why the objects of a loop cannot load a saved state, found without changing them.

Only what a changed script can cause is found here. A state that was damaged on purpose may fail
when it is loaded, which is undone, or in the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hookline.checkpoint.differences import MAX_SHOWN, limit_lines, shape_of
from hookline.errors import listed

_PLAIN = {  # optimizers of torch whose states have the shapes of parameters, apart from scalars
    *("Adam", "AdamW", "RAdam", "NAdam", "Adamax", "Adagrad", "Adadelta"),
    *("RMSprop", "Rprop", "ASGD", "SGD"),
}
_SCALARS = ("step", "mu_product", "eta", "mu")
_KINDS = (
    (bool, "a boolean"),
    ((int, float), "a number"),
    (str, "a text"),
    ((list, tuple), "a list"),
    (Mapping, "a mapping"),
    (torch.Tensor, "a tensor"),
)


def compare_objects(
    kind: str, here: Sequence[Any], saved: Sequence[Any], classes: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return what the optimizers or schedulers of a loop cannot load.

    Args:
        kind: "optimizer" or "scheduler".
        here: the objects.
        saved: their states in a checkpoint.
        classes: the names of the classes that they had there, as far as it has them.
    """
    lines: list[str] = []
    if len(saved) != len(here):
        are = "is" if len(here) == 1 else "are"
        lines = [f"the checkpoint has {_count(saved, kind)}, and here {are} {len(here)}"]
    names = classes.get(f"{kind}s", ())
    for index, (own, state) in enumerate(zip(here, saved, strict=False)):
        name = f"{kind} {index}"
        other_class = describe_class(name, own, names[index] if index < len(names) else None)
        lines += other_class
        if kind == "optimizer":
            lines += describe_optimizer(name, own, state)
        elif not other_class:
            found = _describe_kinds(state, own.state_dict(), may_lack=True)
            lines += [f"{name}: {line}" for line in found]
    return lines


def describe_class(name: str, own: Any, saved: str | None) -> list[str]:
    """Return a line if an object had another class when it was saved; None: it is not known."""
    kind = type(own).__name__
    is_same = saved is None or saved == kind
    return [] if is_same else [f"{name} is {saved} in the checkpoint and {kind} here"]


def compare_scaler(scaler: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return what the gradient scaler cannot load; nothing if there is none."""
    own = {} if scaler is None else scaler.state_dict()
    return [f"the scaler: {line}" for line in _describe_kinds(saved, own)]


def describe_hook_names(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return which hooks have no saved state, and which saved states have no hook."""
    missing = [name for name in here if name not in saved]
    orphaned = [name for name in saved if name not in here]
    texts = ("the checkpoint has no state of these hooks", "saved states without a hook")
    pairs = zip(texts, (missing, orphaned), strict=True)
    return [f"{text}: {listed(names, MAX_SHOWN)}" for text, names in pairs if names]


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
    if lines:
        return lines[: MAX_SHOWN + 1]
    states = [f"{name}: {line}" for line in _describe_parameter_states(optimizer, saved)]
    return limit_lines(states, "other states of parameters")


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


def _describe_parameter_states(optimizer: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield which states do not have the shapes of the states here, or of the parameters."""
    kind = type(optimizer)
    is_plain = kind.__module__.startswith("torch.optim") and kind.__name__ in _PLAIN
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in saved["param_groups"] for i in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        own = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(index, {}).items():
            like = own.get(key, parameter if is_plain else None)
            if key in _SCALARS or is_lazy(parameter) or not hasattr(value, "shape"):
                continue
            if hasattr(like, "shape") and value.shape != like.shape:
                shapes = f"{shape_of(value)} in the checkpoint and {shape_of(like)} here"
                yield f"'{key}' of parameter {index} is {shapes}"


def _describe_kinds(
    saved: Mapping[str, Any], here: Mapping[str, Any], *, may_lack: bool = False
) -> list[str]:
    """Return which values that are known here are missing, or of another kind."""
    lines: list[str] = []
    for key, value in here.items():
        kind, other = _kind(value), _kind(saved.get(key))
        is_needed = not may_lack and kind in ("a number", "a list")  # torch adds switches
        if other is None and is_needed:
            lines.append(f"it has no '{key}' in the checkpoint")
        elif None not in (kind, other) and kind != other:
            lines.append(f"'{key}' is {other} in the checkpoint and {kind} here")
    return lines[:MAX_SHOWN]


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
