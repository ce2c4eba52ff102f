"""The objects that a configuration names: where each stands, and how it will be called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from hookline.config import SECTIONS
from hookline.config_files.file_model import HookConfig, LoaderConfig, ObjectConfig, TrainingConfig
from hookline.config_files.merging import Merged
from hookline.config_files.problems import Key, Problem, shown
from hookline.errors import nearest
from hookline.options import Option

__all__ = [
    "Spec",
    "argument_problems",
    "holds_object",
    "hooks_in",
    "is_object",
    "loaders_in",
    "specs_of",
]

_KEYS = ("class_path", "init_args", "call")


@dataclass(frozen=True)
class Spec:
    """One object of a configuration.

    Attributes:
        key: where it stands.
        path: its class path.
        args: its arguments by name.
        first: how many arguments it gets besides, in front of those.
        called: False for a function that is taken as it is: arguments may be missing.
        itself: True for a class, too, that is taken as it is.
    """

    key: Key
    path: str
    args: Mapping[str, Any]
    first: int = 0
    called: bool = True
    itself: bool = False


def is_object(value: Any) -> bool:
    """Whether an argument is an object that has to be made first."""
    return isinstance(value, Mapping) and "class_path" in value


def specs_of(config: TrainingConfig, merged: Merged, problems: list[Problem]) -> Iterator[Spec]:
    """Every object that is named, those within others included; add what is malformed."""
    for key, one, first, called in _sections(config):
        yield Spec(key, one.class_path, one.init_args, first, called)
        yield from _inside(one.init_args, (*key, "init_args"), merged, problems)
    for which in ("train", "val"):
        for key, _, one in loaders_in(config, which):
            yield Spec(key, one.class_path, one.init_args)
            yield from _inside(one.init_args, (*key, "init_args"), merged, problems)
            if one.loader is not None:
                yield Spec((*key, "loader"), "torch.utils.data.DataLoader", one.loader, 1)
                yield from _inside(one.loader, (*key, "loader"), merged, problems)
    for key, value in _options(config):
        yield from _inside(value, key, merged, problems)


def _options(config: TrainingConfig) -> Iterator[tuple[Key, Any]]:
    """The options of hooks and of groups of parameters."""
    for key, _, hook in hooks_in(config):
        for name, value in hook.item().items():
            yield (*key, name), value
    several = config.optimizer if isinstance(config.optimizer, list) else [config.optimizer]
    for i, one in enumerate(several):
        key = ("optimizer", i) if isinstance(config.optimizer, list) else ("optimizer",)
        for j, group in enumerate(one.groups):
            for name, value in (group.model_extra or {}).items():
                yield (*key, "groups", j, name), value


def _sections(config: TrainingConfig) -> Iterator[tuple[Key, ObjectConfig, int, bool]]:
    yield ("model",), config.model, 0, True
    for name in ("optimizer", "scheduler"):
        given: Any = getattr(config, name)
        if isinstance(given, list):
            for i, one in enumerate(given):
                yield (name, i), one, 1, True
        elif given is not None:
            yield (name,), given, 1, True
    for name in ("loss_fn", "step_fn", "tokens_fn"):
        function: ObjectConfig | None = getattr(config, name)
        if function is not None:
            yield (name,), function, 0, False


def loaders_in(
    config: TrainingConfig, which: str
) -> Iterator[tuple[Key, str | int | None, LoaderConfig]]:
    """The loaders for training or validation: where each stands, its name or number, itself."""
    given: Any = getattr(config.data, which)
    if isinstance(given, LoaderConfig):
        yield ("data", which), None, given
    elif given is not None:
        for name, one in given.items() if isinstance(given, dict) else enumerate(given):
            yield ("data", which, name), name, one


def hooks_in(config: TrainingConfig) -> Iterator[tuple[Key, str | None, HookConfig]]:
    """The hooks of the section `hooks`: where each stands, its section, itself."""
    if isinstance(config.hooks, list):
        for i, one in enumerate(config.hooks):
            yield ("hooks", i), None, one
    else:
        for section in SECTIONS:
            for i, one in enumerate(getattr(config.hooks, section)):
                yield ("hooks", section, i), section, one


def _inside(value: Any, key: Key, merged: Merged, problems: list[Problem]) -> Iterator[Spec]:
    """The objects within a value."""
    if isinstance(value, list):
        for i, one in enumerate(value):
            yield from _inside(one, (*key, i), merged, problems)
    elif isinstance(value, Mapping):
        if "class_path" in value:
            yield from _object(value, key, merged, problems)
        else:
            for name, one in value.items():
                yield from _inside(one, (*key, name), merged, problems)


def _object(
    value: Mapping[str, Any], key: Key, merged: Merged, problems: list[Problem]
) -> Iterator[Spec]:
    before = len(problems)
    for name in value:
        if name not in _KEYS:
            text = f"'{name}' is no key.{nearest(name, _KEYS)} The keys here are: "
            problems.append(merged.problem((*key, name), text + ", ".join(_KEYS) + "."))
    path, args, call = value["class_path"], value.get("init_args"), value.get("call", True)
    args = {} if args is None else args
    expected = {
        "class_path": (isinstance(path, str) and _is_path(path), "a class path"),
        "init_args": (isinstance(args, Mapping), "a mapping"),
        "call": (isinstance(call, bool), "true or false"),
    }
    for name, (fits, what) in expected.items():
        if not fits:
            text = f"It is {shown(value[name])}. Expected {what}."
            problems.append(merged.problem((*key, name), text))
    if call is False and args:
        text = "With `call: false` nothing is called, so there are no arguments."
        problems.append(merged.problem((*key, "init_args"), text))
    if len(problems) == before:
        yield Spec(key, path, args, called=call, itself=not call)
        yield from _inside(args, (*key, "init_args"), merged, problems)


def _is_path(text: str) -> bool:
    return "." in text and all(part.isidentifier() for part in text.split("."))


# -- arguments ------------------------------------------------------------------------------------


def argument_problems(spec: Spec, found: Any, merged: Merged) -> list[Problem]:
    """Say which arguments do not fit the signature of what was found."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some that are written in C have none
        return []
    name = spec.path.rpartition(".")[2]
    inside = "init_args" if spec.key[-1] != "loader" else None
    key: Key = spec.key if inside is None else (*spec.key, inside)
    parameters = list(signature.parameters.values())
    placed = [
        one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    taken = {one.name for one in placed[: spec.first]}
    known = {
        one.name: one
        for one in parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name not in taken
    }
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
    problems: list[Problem] = []
    for argument, value in spec.args.items():
        if argument in known:
            wrong = _wrong_value(found, known[argument], value)
            if wrong is not None:
                problems.append(merged.problem((*key, argument), wrong))
        elif argument in taken:
            text = f"'{argument}' of {name} is given without being named. Leave it out."
            problems.append(merged.problem((*key, argument), text))
        elif not open_ended:
            takes = f" It takes: {', '.join(known)}." if known else " It takes none."
            text = f"{name} has no argument '{argument}'.{nearest(argument, known)}{takes}"
            problems.append(merged.problem((*key, argument), text))
    missing = [
        one.name for one in known.values() if one.default is one.empty and one.name not in spec.args
    ]
    if missing and (spec.called or isinstance(found, type)):
        text = f"{name} needs the argument '{missing[0]}'."
        problems.append(merged.problem((*key, missing[0]), text))
    return problems


def _wrong_value(found: Any, parameter: inspect.Parameter, value: Any) -> str | None:
    """What is wrong with a value, by the parameter's annotation; objects are made later."""
    if holds_object(value) or value == parameter.default:
        return None
    try:
        made: Any = getattr(found, "__init__") if isinstance(found, type) else found  # noqa: B009
        hint = get_type_hints(made, include_extras=True).get(parameter.name)
        if hint is None:
            return None
        option = Option(parameter.name, "", parameter.default, "", hint)
        problem = option.find_problem(value)
    except Exception:  # annotations that only a type checker understands
        return None
    return None if problem is None else f"It is {shown(value)}. {problem}."


def holds_object(value: Any) -> bool:
    """Whether a value is an object that has to be made first, or has one in it."""
    if isinstance(value, list):
        return any(holds_object(one) for one in value)
    if isinstance(value, Mapping):
        return "class_path" in value or any(holds_object(one) for one in value.values())
    return False
