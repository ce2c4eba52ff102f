"""Differences between a checkpoint and the loop that it is loaded into, and what fits of it.

The loop is described by its model's `state_dict` and by the state that a checkpoint of it would
have: `optimizers`, `schedulers` and `hooks`, and `classes`, the class names of the first two.
Nothing here imports torch.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hookline.errors import CheckpointError, listed
from hookline.printable import message_lines

if TYPE_CHECKING:
    from hookline.checkpoint.folder import Checkpoint

log = logging.getLogger("hookline")

_MAX_SHOWN = 5  # of one kind; the others are counted

State = Mapping[str, Any]


def describe_differences(checkpoint: Checkpoint, *, model: State, state: State) -> list[str]:
    """Return all differences between a checkpoint and a loop, one line each; values may differ."""
    saved = checkpoint.state
    lines = describe_mismatches(checkpoint.model, model)
    lines += _describe_dtypes(checkpoint.model, model)
    lines += _compare("optimizer", saved, state)[0] + _compare("scheduler", saved, state)[0]
    return lines + describe_hook_differences(saved.get("hooks", {}), state.get("hooks", {}))


def fit_checkpoint(
    checkpoint: Checkpoint,
    *,
    model: State,
    state: State,
    what: str,
    advice: str,
    strict: bool,
    unloadable: Mapping[tuple[str, int], list[str]],
    problems: Sequence[str] = (),
    more: Callable[[], list[str]] = list,
) -> Checkpoint:
    """Return a checkpoint as a loop can load it, after comparing all of it.

    It is not changed. Hooks may come and go: if only their states differ, the checkpoint fits.

    Args:
        checkpoint: The checkpoint.
        model: The `state_dict` of the model.
        state: The state that a checkpoint of this loop would have now.
        what: The loop that it is loaded into, for the message.
        advice: How to make it fit, for the message.
        strict: Raise if something does not fit; otherwise list it, and return what fits.
        unloadable: Lines about sections that cannot be loaded, by section and index; -1 stands
            for the whole section.
        problems: Lines about what cannot be loaded and has no replacement: they always raise.
        more: Returns further lines for the message.
    """
    lines = describe_differences(checkpoint, model=model, state=state)
    hooks = describe_hook_differences(checkpoint.state.get("hooks", {}), state.get("hooks", {}))
    if len(lines) == len(hooks) and not unloadable and not problems:
        return checkpoint
    lines += [line for found in unloadable.values() for line in found]
    lines += [*problems, *more()]
    text = f"The checkpoint {checkpoint.path} does not fit {what}"
    if strict or problems:
        raise CheckpointError(message_lines(f"{text}. Nothing was changed. {advice}", *lines))
    log.warning("%s", message_lines(f"{text}; what fits is loaded.", *lines))
    fitting = select_fitting(checkpoint, model=model, state=state)
    replaced = dict(fitting.state)
    for section, index in unloadable:
        own = state[section]
        replaced[section] = (
            [own[at] if at == index else one for at, one in enumerate(replaced[section])]
            if index >= 0
            else own
        )
    return replace(fitting, state=replaced)


def describe_hook_differences(saved: State, here: State) -> list[str]:
    """Return which hooks have no saved state, and which saved states have no hook."""
    missing = [name for name in here if name not in saved]
    orphaned = [name for name in saved if name not in here]
    lines = [f"the checkpoint has no state of these hooks: {listed(missing, _MAX_SHOWN)}"] * bool(
        missing
    )
    return lines + [f"saved states without a hook: {listed(orphaned, _MAX_SHOWN)}"] * bool(orphaned)


def describe_mismatches(weights: State, expected: State) -> list[str]:
    """Return how the names and shapes of weights differ from a model's, in a few lines."""
    missing = [name for name in expected if name not in weights]
    unknown = [name for name in weights if name not in expected]
    lines = [
        f"{owner} lacks {listed(names, _MAX_SHOWN)}"
        for owner, names in (("the checkpoint", missing), ("the model", unknown))
        if names
    ]
    shapes = [
        f"'{name}' is {_shape(value)} in the checkpoint and {_shape(expected[name])} here"
        for name, value in weights.items()
        if name in expected and _shape(value) != _shape(expected[name])
    ]
    return lines + _limit(shapes, "other shapes")


def _shape(value: Any) -> Any:
    """Return the shape of a tensor, or that it is none."""
    return tuple(value.shape) if hasattr(value, "shape") else "not a tensor"


def fitting_weights(weights: State, expected: State) -> OrderedDict[str, Any]:
    """Return the weights that a model has, too, and with the same shape."""
    fitting = OrderedDict(
        (name, value)
        for name, value in weights.items()
        if name in expected and _shape(value) == _shape(expected[name])
    )
    return with_versions(fitting, weights)


def with_versions(weights: OrderedDict[str, Any], source: State) -> OrderedDict[str, Any]:
    """Give weights the versions of modules that the weights they were taken from have."""
    if hasattr(source, "_metadata"):
        weights._metadata = source._metadata  # type: ignore[attr-defined]
    return weights


def select_fitting(checkpoint: Checkpoint, *, model: State, state: State) -> Checkpoint:
    """Return what a loop can load: the checkpoint's values, its own where these do not fit."""
    saved = checkpoint.state
    weights = OrderedDict({**model, **fitting_weights(checkpoint.model, model)})
    with_versions(weights, checkpoint.model)
    fits = {f"{kind}s": _compare(kind, saved, state)[1] for kind in ("optimizer", "scheduler")}
    if describe_mismatches(checkpoint.model, model):
        fits["optimizers"] = [False] * len(fits["optimizers"])
    chosen = _choose(fits, saved, state)
    gradients = {"pending_gradients": fits["optimizers"]}  # of the optimizers
    chosen |= _choose(gradients, saved, state)
    if "settings" in saved and "settings" in state:
        own_settings = _choose(fits, saved["settings"], state["settings"])
        chosen["settings"] = {**saved["settings"], **own_settings}
    return replace(checkpoint, model=weights, state={**saved, **chosen})


def _compare(kind: str, saved: State, here: State) -> tuple[list[str], list[bool]]:
    """Return how the optimizers or schedulers differ, and which of those here can be loaded."""
    before, now = saved.get(f"{kind}s", ()), here.get(f"{kind}s", ())
    lines, fits = [], [False] * len(now)
    if len(before) != len(now):
        are = "is" if len(now) == 1 else "are"
        lines.append(f"the checkpoint has {_count(before, kind)}, and here {are} {len(now)}")
    for index, both in enumerate(zip(before, now, strict=False)):
        found = _describe_classes(kind, index, saved, here)
        if kind == "optimizer":
            found += describe_groups(f"optimizer {index}", *both)
        lines += found
        fits[index] = not found
    return lines, fits


def _choose(fits: Mapping[str, Sequence[bool]], saved: State, own: State) -> dict[str, Any]:
    """Return lists with the saved values that fit, and the loop's own ones where they do not."""
    return {
        name: [saved[name][i] if fits[name][i] else value for i, value in enumerate(own[name])]
        for name in fits
        if name in saved and name in own
    }


def _describe_dtypes(weights: State, expected: State) -> list[str]:
    lines = [
        f"'{name}' is {value.dtype} in the checkpoint and {expected[name].dtype} here"
        for name, value in fitting_weights(weights, expected).items()
        if getattr(value, "dtype", None) != getattr(expected[name], "dtype", None)
    ]
    return _limit(lines, "other dtypes")


def _describe_classes(kind: str, index: int, saved: State, here: State) -> list[str]:
    names = [
        state.get("classes", {}).get(f"{kind}s", ())[index : index + 1] for state in (saved, here)
    ]
    if not all(names) or names[0] == names[1]:  # older checkpoints do not have the classes
        return []
    return [f"{kind} {index} is {names[0][0]} in the checkpoint and {names[1][0]} here"]


def describe_groups(name: str, saved: State, here: State) -> list[str]:
    """Return how the groups of an optimizer of this name, and its states' shapes, differ."""
    before, now = saved["param_groups"], here["param_groups"]
    if len(before) != len(now):
        count = _count(before, "parameter group")
        return [f"{name} has {count} in the checkpoint and {len(now)} here"]
    lines: list[str] = []
    for index, groups in enumerate(zip(before, now, strict=True)):
        counts = [len(group["params"]) for group in groups]
        names = [group.get("param_names") for group in groups]
        place = f"group {index} of {name}"
        if counts[0] != counts[1]:
            count = _count(groups[0]["params"], "parameter")
            lines.append(f"{place} has {count} in the checkpoint and {counts[1]} here")
        elif all(names) and names[0] != names[1]:
            first, second = next(pair for pair in zip(*names, strict=True) if pair[0] != pair[1])
            lines.append(f"{place} has '{first}' in the checkpoint where '{second}' is here")
    shapes = [
        f"'{key}' of parameter {index} of {name} is {_shape(value)} in the checkpoint and "
        f"{_shape(own)} here"
        for index, values in saved["state"].items()
        for key, value in (values.items() if isinstance(values, dict) else ())
        if hasattr(own := here["state"].get(index, {}).get(key), "shape")
        and hasattr(value, "shape")
        and _shape(value) != _shape(own)
    ]
    return lines + _limit(shapes, "other shapes")


def _limit(lines: list[str], what: str) -> list[str]:
    if len(lines) <= _MAX_SHOWN:
        return lines
    return [*lines[:_MAX_SHOWN], f"and {len(lines) - _MAX_SHOWN} {what}"]


def _count(items: Sequence[Any], what: str) -> str:
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"
