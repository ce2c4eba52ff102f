"""The objects named by a configuration: the key of each, and the arguments it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_type_hints

from hookline.config.hook_items import SECTIONS
from hookline.config_files.config_tree import (
    ConfigTree,
    Key,
    ProblemList,
    format_name,
    format_value,
)
from hookline.config_files.file_model import HookConfig, LoaderConfig, TrainingConfig
from hookline.config_files.trust import load_object
from hookline.errors import nearest
from hookline.options import Option

__all__ = [
    "ObjectSpec",
    "contains_object",
    "find_argument_problems",
    "iterate_hooks",
    "iterate_loaders",
    "iterate_section",
    "iterate_specs",
]

_KEYS = ("class_path", "init_args", "call")


@dataclass(frozen=True)
class ObjectSpec:
    """One object of a configuration.

    Attributes:
        key: the key of the object.
        path: its class path.
        args: its arguments by name.
        positional: the number of positional arguments that it receives besides.
        is_called: False for a function that is passed on, so that arguments may be missing.
        is_reference: True for a class or function that is passed on without arguments.
    """

    key: Key
    path: str
    args: Mapping[str, Any]
    positional: int = 0
    is_called: bool = True
    is_reference: bool = False


def iterate_specs(
    config: TrainingConfig, tree: ConfigTree, problems: ProblemList
) -> Iterator[ObjectSpec]:
    """Yield every object, including objects within objects; add malformed ones to `problems`."""
    for name in ("model", "optimizer", "scheduler", "loss_fn", "step_fn", "tokens_fn"):
        positional = 1 if name in ("optimizer", "scheduler") else 0
        for key, section in iterate_section(config, name):
            path, args = section.class_path, section.init_args
            yield ObjectSpec(key, path, args, positional, is_called=not name.endswith("_fn"))
            yield from _specs_within(args, (*key, "init_args"), tree, problems)
    for split in ("train", "val"):
        for key, _, data in iterate_loaders(config, split):
            yield ObjectSpec(key, data.class_path, data.init_args)
            yield from _specs_within(data.init_args, (*key, "init_args"), tree, problems)
            if data.loader is not None:
                yield ObjectSpec((*key, "loader"), "torch.utils.data.DataLoader", data.loader, 1)
                yield from _specs_within(data.loader, (*key, "loader"), tree, problems)
    for key, value in _options(config):
        yield from _specs_within(value, key, tree, problems)


def _options(config: TrainingConfig) -> Iterator[tuple[Key, Any]]:
    """Yield the options of hooks and of parameter groups."""
    for key, _, hook in iterate_hooks(config):
        for name, value in hook.item().items():
            yield (*key, name), value
    for key, optimizer in iterate_section(config, "optimizer"):
        for j, group in enumerate(optimizer.groups):
            for name, value in (group.model_extra or {}).items():
                yield (*key, "groups", j, name), value


def iterate_section(config: TrainingConfig, name: str) -> Iterator[tuple[Key, Any]]:
    """Yield the key and the item of a section that is missing, one item, or a list of items."""
    section = getattr(config, name)
    if isinstance(section, list):
        yield from (((name, i), item) for i, item in enumerate(section))
    elif section is not None:
        yield (name,), section


def iterate_loaders(
    config: TrainingConfig, split: str
) -> Iterator[tuple[Key, str | int | None, LoaderConfig]]:
    """Yield the loaders of "train" or "val": the key, the name or index if several, the loader."""
    section: Any = getattr(config.data, split)
    if isinstance(section, LoaderConfig):
        yield ("data", split), None, section
    elif section is not None:
        for name, loader in section.items() if isinstance(section, dict) else enumerate(section):
            yield ("data", split, name), name, loader


def iterate_hooks(config: TrainingConfig) -> Iterator[tuple[Key, str | None, HookConfig]]:
    """Yield the hooks of the section `hooks`: the key, the kind that it requires, the hook."""
    if isinstance(config.hooks, list):
        for i, hook in enumerate(config.hooks):
            yield ("hooks", i), None, hook
    else:
        for section, kind in SECTIONS.items():
            for i, hook in enumerate(getattr(config.hooks, section)):
                yield ("hooks", section, i), kind, hook


def _specs_within(
    value: Any, key: Key, tree: ConfigTree, problems: ProblemList
) -> Iterator[ObjectSpec]:
    """Yield the objects within a value."""
    if isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _specs_within(inner, (*key, i), tree, problems)
    elif isinstance(value, Mapping):
        if "class_path" in value:
            yield from _spec_of(value, key, tree, problems)
        else:
            for name, inner in value.items():
                yield from _specs_within(inner, (*key, name), tree, problems)


def _spec_of(
    value: Mapping[str, Any], key: Key, tree: ConfigTree, problems: ProblemList
) -> Iterator[ObjectSpec]:
    known_problems = len(problems)
    for name in value:
        if name not in _KEYS:
            text = f"Unknown key '{format_name(name)}'.{nearest(name, _KEYS)} The keys here are: "
            problems.append(tree.problem((*key, name), text + ", ".join(_KEYS) + "."))
    path, args, call = value["class_path"], value.get("init_args"), value.get("call", True)
    args = {} if args is None else args
    expected = {
        "class_path": (isinstance(path, str) and _is_path(path), "a class path"),
        "init_args": (isinstance(args, Mapping), "a mapping"),
        "call": (isinstance(call, bool), "true or false"),
    }
    for name, (is_valid, description) in expected.items():
        if not is_valid:
            text = f"It is {format_value(value[name])}. Expected {description}."
            problems.append(tree.problem((*key, name), text))
    if call is False and args:
        text = "With `call: false` nothing is called. Remove the arguments."
        problems.append(tree.problem((*key, "init_args"), text))
    if len(problems) == known_problems:
        yield ObjectSpec(key, path, args, is_called=call, is_reference=not call)
        yield from _specs_within(args, (*key, "init_args"), tree, problems)


def _is_path(text: str) -> bool:
    return "." in text and all(part.isidentifier() for part in text.split("."))


# -- arguments ------------------------------------------------------------------------------------


def find_argument_problems(
    spec: ObjectSpec, target: Any, tree: ConfigTree, problems: ProblemList
) -> None:
    """Add the arguments that do not match the signature of a class or function."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    name = spec.path.rpartition(".")[2]
    key: Key = spec.key if spec.key[-1] == "loader" else (*spec.key, "init_args")
    parameters = list(signature.parameters.values())
    positional = [
        one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    taken = {one.name for one in positional[: spec.positional]}
    known = {
        one.name: one
        for one in parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name not in taken
    }
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for argument, value in spec.args.items():
        text: str | None = None
        if argument in known:
            text = _find_value_problem(target, known[argument], value)
        elif argument in taken:
            text = f"The argument '{argument}' of {name} is passed automatically. Remove it."
        elif not open_ended:
            valid = f"The arguments are: {', '.join(known)}." if known else "It has no arguments."
            hint = nearest(argument, known)
            text = f"{name} has no argument '{format_name(argument)}'.{hint} {valid}"
        if text is not None:
            problems.append(tree.problem((*key, argument), text))
    missing = [
        one.name for one in known.values() if one.default is one.empty and one.name not in spec.args
    ]
    if missing and (spec.is_called or isinstance(target, type)):
        text = f"{name} requires the argument '{missing[0]}'."
        problems.append(tree.problem((*key, missing[0]), text))


def _find_value_problem(target: Any, parameter: inspect.Parameter, value: Any) -> str | None:
    """Return why a value does not match its annotation; values with objects are not checked.

    A class that is passed on, with `call: false`, is compared with the annotation itself.
    """
    is_class = isinstance(value, Mapping) and value.get("call") is False
    if (contains_object(value) and not is_class) or value == parameter.default:
        return None
    try:
        if is_class:
            value = load_object(value["class_path"])
            if not isinstance(value, type):
                return None
        hint = _read_hint(target, parameter.name)
        if hint is None:
            return None
        option = Option(parameter.name, "", parameter.default, "", hint)
        problem = option.find_problem(value)
    except Exception:  # annotations that only a type checker understands
        return None
    if problem is None:
        return None
    hint = ""
    if is_class:
        hint = " To create an instance, remove `call: false`."
    elif isinstance(value, str) and _is_path(value) and "instance of" in problem:
        hint = f" To create it, write {{class_path: {value}}}."
    return f"It is {format_value(value, (parameter.name,))}. {problem}.{hint}"


def _read_hint(target: Any, name: str) -> Any:
    """Return the type of one parameter; those of others may be known to type checkers only."""
    called: Any = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    function = inspect.unwrap(called)
    annotations = getattr(function, "__annotations__", {})
    if name not in annotations:
        return None
    one = SimpleNamespace(__annotations__={name: annotations[name]})
    return get_type_hints(one, getattr(function, "__globals__", {}), include_extras=True)[name]


def contains_object(value: Any) -> bool:
    """Return whether a value is or contains an object that has to be created first."""
    if isinstance(value, list):
        return any(contains_object(inner) for inner in value)
    if isinstance(value, Mapping):
        return "class_path" in value or any(contains_object(inner) for inner in value.values())
    return False
