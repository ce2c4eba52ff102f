"""Comparing two recordings: the first difference, in the order in which training happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hookline.verification.recording import ModuleCall, Recording

Kind = Literal["batch", "random", "loss", "weights", "steps", "state", "error"]

_TRAINING = ("model", "optimizers", "schedulers", "scaler", "step", "epoch", "round")
_RANDOM = "position.now"


@dataclass(frozen=True)
class Difference:
    """The first difference between two recordings."""

    kind: Kind
    step: int | None  # None if only the state at the end differs
    names: tuple[str, ...]  # the loader of a batch, the parameters, or the paths in the state
    text: str


def compare(a: Recording, b: Recording) -> Difference | None:
    """Return the first difference in what training did, without the states of hooks.

    If one of the runs was resumed, only the steps after that are compared.
    """
    for one in (a, b):
        if one.error is not None:
            return Difference("error", None, (), f"training fails: {one.error}")
    first = max(a.first_step, b.first_step)
    last = min(a.last_step, b.last_step)
    for step in range(first + 1, last + 1):
        found = _compare_step(a, b, step)
        if found is not None:
            return found
    if a.last_step != b.last_step:
        text = f"one run ends after step {a.last_step}, the other after step {b.last_step}"
        return Difference("steps", last + 1, (), text)
    return _compare_states(a, b)


def _compare_step(a: Recording, b: Recording, step: int) -> Difference | None:
    ours, theirs = ([batch for batch in one.batches if batch.step == step] for one in (a, b))
    for mine, other in zip(ours, theirs, strict=False):
        if (mine.loader, mine.batch) != (other.loader, other.batch):
            loader, number = mine.loader, mine.batch_idx
            text = f"the loader '{loader}' gives another batch {number} in step {step}"
            return Difference("batch", step, (loader,), text)
        if mine.random != other.random:
            text = f"the random states differ before step {step}"
            return Difference("random", step, (), text)
    if len(ours) != len(theirs):
        text = f"step {step} has {len(ours)} batches in one run and {len(theirs)} in the other"
        return Difference("batch", step, (ours or theirs)[-1][1:2], text)
    mine_step, other_step = a.steps.get(step), b.steps.get(step)
    if mine_step is None or other_step is None:
        return None  # a step that was skipped has no number of its own
    names = tuple(n for n, d in mine_step.weights.items() if other_step.weights.get(n) != d)
    if repr(mine_step.loss) != repr(other_step.loss):
        text = f"the loss of step {step} is {mine_step.loss!r} and {other_step.loss!r}"
        return Difference("loss", step, names, text)
    if names:
        text = f"{len(names)} of {len(mine_step.weights)} weights and buffers differ after step "
        return Difference("weights", step, names, f"{text}{step}, first '{names[0]}'")
    return None


def _compare_states(a: Recording, b: Recording) -> Difference | None:
    def is_compared(path: str) -> bool:
        return path.startswith(_RANDOM) or path.partition(".")[0] in _TRAINING

    names = _differing(a.final, b.final, is_compared)
    if not names:
        return None
    if names[0].startswith(_RANDOM):
        return Difference("random", None, names, "the random states differ at the end")
    return Difference("state", None, names, f"'{names[0]}' differs at the end")


def find_hook_differences(
    a: Recording, b: Recording, ignored: frozenset[str]
) -> dict[str, list[str]]:
    """Return which values in hooks' states and attributes differ at the end, by hook.

    Attributes are compared for hooks of the user that have a `state_dict`.
    """
    states = _differing(a.final, b.final, _is_of_hook, ignored)
    found: dict[str, list[str]] = {}
    for path in states:
        name, _, inner = path.removeprefix("hooks.").partition(".")
        found.setdefault(name, []).append(f"state_dict()['{inner}']" if inner else "state_dict()")
    for name in sorted(a.stateful_hooks & b.stateful_hooks):
        found.setdefault(name, []).extend(_differing_attributes(a, b, name, ignored))
    return {name: paths for name, paths in found.items() if paths}


def find_reset_hooks(a: Recording, b: Recording, ignored: frozenset[str]) -> set[str]:
    """Return the user's hooks without `state_dict` whose attributes differ at the end."""
    names = a.attributes.keys() & b.attributes.keys()
    stateless = names - a.stateful_hooks - b.stateful_hooks
    return {name for name in stateless if _differing_attributes(a, b, name, ignored)}


def _differing_attributes(
    a: Recording, b: Recording, name: str, ignored: frozenset[str]
) -> list[str]:
    prefix = f"attributes.{name}."
    ours, theirs = (
        {prefix + key: value for key, value in one.attributes[name].items() if key}
        for one in (a, b)
    )
    paths = _differing(ours, theirs, ignored=ignored)
    return [path.removeprefix(prefix) for path in paths]


def find_unstable_paths(a: Recording, b: Recording) -> frozenset[str]:
    """Return what differs between hooks of two runs that did the same, such as measured times."""
    paths = set(_differing(a.final, b.final, _is_of_hook))
    for name in a.attributes.keys() & b.attributes.keys():
        differing = _differing(a.attributes[name], b.attributes[name])
        paths |= {f"attributes.{name}.{path}" for path in differing}
    return frozenset(paths)


def find_first_module(a: Recording, b: Recording) -> tuple[ModuleCall, bool] | None:
    """Return the first call of a module whose output differs, and whether its inputs were equal."""
    first = max(a.first_step, b.first_step)
    ours, theirs = ([call for call in one.modules if call.step > first] for one in (a, b))
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return mine, mine[:4] == other[:4]
    return None


def _is_of_hook(path: str) -> bool:
    return path.startswith("hooks.")


def _differing(
    a: dict[str, str],
    b: dict[str, str],
    selected: Callable[[str], bool] = lambda _: True,
    ignored: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    paths = [*a, *(path for path in b if path not in a)]
    return tuple(
        path
        for path in paths
        if path not in ignored and selected(path) and a.get(path) != b.get(path)
    )
