"""The objects named by a configuration: the key of each, and the arguments it is called with.

`check_objects` imports what class paths name, and compares arguments with signatures; nothing is
called.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, get_type_hints

from hookline.config.hook_items import SECTIONS, HookItem
from hookline.config.hook_names import find_hook
from hookline.config_files.config_tree import (
    ConfigTree,
    Key,
    ProblemList,
    format_value,
)
from hookline.config_files.file_model import HookConfig, LoaderConfig, TrainingConfig
from hookline.config_files.trust import Trust, load_object
from hookline.errors import HooklineError, nearest
from hookline.options import Option, OptionsError

_KEYS = ("class_path", "init_args", "call")


@dataclass(frozen=True)
class _ObjectSpec:
    """One object of a configuration, with its arguments by name."""

    key: Key
    path: str
    args: Mapping[str, Any]
    positional: int = 0  # how many positional arguments it receives besides
    is_called: bool = True  # False: a function that is passed on; arguments may be missing
    is_reference: bool = False  # a class or function that is passed on without arguments


def _iterate_specs(
    config: TrainingConfig, tree: ConfigTree, problems: ProblemList
) -> Iterator[_ObjectSpec]:
    """Yield every object, including objects within objects; add malformed ones to `problems`."""
    for name in ("model", "optimizer", "scheduler", "loss_fn", "step_fn", "tokens_fn"):
        positional = 1 if name in ("optimizer", "scheduler") else 0
        for key, section in iterate_section(config, name):
            path, args = section.class_path, section.init_args
            yield _ObjectSpec(key, path, args, positional, is_called=not name.endswith("_fn"))
            yield from _specs_within(args, (*key, "init_args"), tree, problems)
    for split in ("train", "val"):
        for key, _, data in iterate_loaders(config, split):
            yield _ObjectSpec(key, data.class_path, data.init_args)
            yield from _specs_within(data.init_args, (*key, "init_args"), tree, problems)
            if data.loader is not None:
                yield _ObjectSpec((*key, "loader"), "torch.utils.data.DataLoader", data.loader, 1)
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


def iterate_hooks(config: Any) -> Iterator[tuple[Key, str | None, HookConfig]]:
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
) -> Iterator[_ObjectSpec]:
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
) -> Iterator[_ObjectSpec]:
    known_problems = len(problems)
    for name in value:
        if name not in _KEYS:
            text = f"Unknown key '{name}'.{nearest(name, _KEYS)} The keys here are: "
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
        yield _ObjectSpec(key, path, args, is_called=call, is_reference=not call)
        yield from _specs_within(args, (*key, "init_args"), tree, problems)


def _is_path(text: str) -> bool:
    return "." in text and all(part.isidentifier() for part in text.split("."))


# -- arguments ------------------------------------------------------------------------------------


def _find_argument_problems(
    spec: _ObjectSpec, target: Any, tree: ConfigTree, problems: ProblemList
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
            text = f"{name} has no argument '{argument}'.{hint} {valid}"
        if text is not None:
            problems.append(tree.problem((*key, argument), text))
    missing = [
        one.name for one in known.values() if one.default is one.empty and one.name not in spec.args
    ]
    if missing and (spec.is_called or isinstance(target, type)):
        text = f"{name} requires the argument '{missing[0]}'."
        problems.append(tree.problem((*key, missing[0]), text))


def _find_value_problem(target: Any, parameter: inspect.Parameter, value: Any) -> str | None:
    """Return why a value does not match its annotation; values with objects are not checked."""
    is_class = isinstance(value, Mapping) and value.get("call") is False
    if (_contains_object(value) and not is_class) or value == parameter.default:
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
    return problem and f"It is {format_value(value, (parameter.name,))}. {problem}."


def _read_hint(target: Any, name: str) -> Any:
    """Return the type of one parameter; those of others may be known to type checkers only."""
    called: Any = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    function = inspect.unwrap(called)
    annotations = getattr(function, "__annotations__", {})
    if name not in annotations:
        return None
    one = SimpleNamespace(__annotations__={name: annotations[name]})
    return get_type_hints(one, getattr(function, "__globals__", {}), include_extras=True)[name]


def _contains_object(value: Any) -> bool:
    """Return whether a value is or contains an object that has to be created first."""
    if isinstance(value, list):
        return any(_contains_object(inner) for inner in value)
    if isinstance(value, Mapping):
        return "class_path" in value or any(_contains_object(inner) for inner in value.values())
    return False


# -- checking --------------------------------------------------------------------------------------


@dataclass
class ResolvedObjects:
    """The objects named by a configuration, imported and checked.

    Attributes:
        targets: the class or function of each class path.
        hooks: the checked hooks, by key. A hook with objects among its options is not included,
            because its options can only be checked when the objects have been created.
    """

    targets: dict[str, Any] = field(default_factory=dict[str, Any])
    hooks: dict[Key, HookItem] = field(default_factory=dict[Key, HookItem])


def check_objects(config: TrainingConfig, tree: ConfigTree, trust: Trust) -> ResolvedObjects:
    """Import every class that is named, if all are trusted, and compare arguments."""
    return _ObjectChecker(config, tree, trust).check()


def check_hooks(config: Any, tree: ConfigTree, trust: Trust) -> list[HookItem]:
    """Import every hook of a configuration that has only `hooks`; return them, checked."""
    return list(_ObjectChecker(config, tree, trust).check_hooks().values())


class _ObjectChecker:
    def __init__(self, config: Any, tree: ConfigTree, trust: Trust) -> None:
        self._config, self._tree, self._trust = config, tree, trust
        self._problems = ProblemList()
        self._resolved = ResolvedObjects()

    def check(self) -> ResolvedObjects:
        specs = list(_iterate_specs(self._config, self._tree, self._problems))
        hook_paths = [*self._hook_paths(), *self._trainer_hook_paths()]
        for key, path in [*((_path_key(spec), spec.path) for spec in specs), *hook_paths]:
            self._add_problem(key, self._trust.find_problem(path))
        self._problems.raise_any()
        for spec in specs:
            self._resolve(_path_key(spec), spec.path)
            if spec.path in self._resolved.targets and not spec.is_reference:
                target = self._resolved.targets[spec.path]
                _find_argument_problems(spec, target, self._tree, self._problems)
        for key, path in hook_paths:
            self._resolve(key, path)
        for hook_key, kind, hook in iterate_hooks(self._config):
            self._check_hook(hook_key, kind, hook)
        self._check_consistency()
        self._problems.raise_any()
        return self._resolved

    def check_hooks(self) -> dict[Key, HookItem]:
        paths = list(self._hook_paths())
        for key, path in paths:
            self._add_problem(key, self._trust.find_problem(path))
        self._problems.raise_any()
        for key, path in paths:
            self._resolve(key, path)
        for hook_key, kind, hook in iterate_hooks(self._config):
            self._check_hook(hook_key, kind, hook)
        self._problems.raise_any()
        return self._resolved.hooks

    def _add_problem(self, key: Key, text: str | None) -> None:
        if text is not None:
            self._problems.append(self._tree.problem(key, text))

    def _resolve(self, key: Key, path: str) -> None:
        """Import the class or function of a class path."""
        if path in self._resolved.targets:
            return
        try:
            target = load_object(path)
        except LookupError as error:
            self._add_problem(key, f"'{path}': {error}")
            return
        problem = self._trust.find_problem(path) or self._trust.find_target_problem(path, target)
        self._add_problem(key, problem)
        if problem is None:
            self._resolved.targets[path] = target

    def _hook_paths(self) -> Iterator[tuple[Key, str]]:
        """Yield the class path of every hook of the section `hooks`."""
        for key, _, hook in iterate_hooks(self._config):
            given_as = "name" if hook.class_path is None else "class_path"
            yield from self._find_path((*key, given_as), str(getattr(hook, given_as)))

    def _trainer_hook_paths(self) -> Iterator[tuple[Key, str]]:
        """Yield the class path of every hook of the section `trainer`."""
        for i, name in enumerate(self._config.trainer.hooks.hook_classes):
            yield from self._find_path(("trainer", "hooks", "hook_classes", i), name)

    def _find_path(self, key: Key, name: str) -> Iterator[tuple[Key, str]]:
        try:
            yield key, find_hook(name).path
        except HooklineError as error:
            self._add_problem(key, str(error))

    def _check_hook(self, key: Key, kind: str | None, hook: HookConfig) -> None:
        """Load a hook's class and check its options."""
        item = hook.item()
        has_objects = _contains_object(item)
        try:
            checked = HookItem.read(item, kind, check_values=not has_objects)
            if not has_objects:
                self._resolved.hooks[key] = checked
        except OptionsError as error:
            for problem in error.problems:
                is_inside = problem.option in (hook.init_args or {})
                option_key = (*key, *(["init_args"] if is_inside else []), problem.option)
                self._add_problem(option_key, f"{error.class_name}: {problem.text}")
        except (HooklineError, ValueError, TypeError) as error:
            self._add_problem(key, str(error))

    def _check_consistency(self) -> None:
        """Compare sections that depend on each other."""
        config = self._config
        if config.loss_fn is not None and config.step_fn is not None:
            text = "`loss_fn` is given, too, and would not be called. Keep one of them."
            self._add_problem(("step_fn",), text)
        trainer_seed = config.trainer.seed
        if None not in (config.seed, trainer_seed) and trainer_seed != config.seed:
            text = f"It is {trainer_seed}, but `seed` is {config.seed}. Keep one of them."
            self._add_problem(("trainer", "seed"), text)
        optimizers = len(list(iterate_section(config, "optimizer")))
        for key, optimizer in iterate_section(config, "optimizer"):
            self._check_rate((*key, "init_args"), optimizer.init_args)
            for i, group in enumerate(optimizer.groups):
                self._check_rate((*key, "groups", i), group.model_extra or {})
        for key, scheduler in iterate_section(config, "scheduler"):
            if scheduler.optimizer >= optimizers:
                count = f"there are {optimizers} optimizers, counted from 0"
                text = f"It is {scheduler.optimizer}, but {count}."
                self._add_problem((*key, "optimizer"), text)

    def _check_rate(self, key: Key, options: Mapping[str, Any]) -> None:
        lr: Any = options.get("lr")
        if type(lr) in (int, float) and not 0 <= lr < math.inf:
            text = f"It is {format_value(lr)}. Expected a learning rate of 0 or more."
            self._add_problem((*key, "lr"), text)


def _path_key(spec: _ObjectSpec) -> Key:
    return spec.key if spec.key[-1] == "loader" else (*spec.key, "class_path")
