"""The objects named by a configuration: the key of each, and the arguments it is called with.

`check_objects` imports what class paths name, and compares arguments with signatures; nothing is
called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_type_hints

from hookline.config.hook_items import SECTIONS, HookItem
from hookline.config.hook_names import find_hook, load_object
from hookline.config_files.sections import (
    HookConfig,
    InnerObject,
    LoaderConfig,
    TrainingConfig,
    validate_as,
)
from hookline.config_files.tree import ConfigTree, FileError, Key, ProblemList, format_value
from hookline.config_files.trust import Trust
from hookline.errors import HooklineError, nearest
from hookline.options import Option, OptionsError

Targets = dict[str, Any]
"""The class or function of each class path."""


def check_objects(config: TrainingConfig, tree: ConfigTree, trust: Trust) -> Targets:
    """Import every class that is named, if all are trusted, and compare arguments."""
    return _ObjectChecker(config, tree, trust).check()


def check_hooks(config: Any, tree: ConfigTree, trust: Trust) -> None:
    """Import every hook of a file that has only `hooks`, and check its options."""
    _ObjectChecker(config, tree, trust).check_hooks()


# -- sections --------------------------------------------------------------------------------------


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


# -- checking --------------------------------------------------------------------------------------


_SECTIONS = ("model", "optimizer", "scheduler", "loss_fn", "step_fn", "tokens_fn", "data")


@dataclass(frozen=True)
class _ObjectSpec:
    """One object of a configuration, with its arguments by name."""

    path_key: Key
    path: str
    args_key: Key
    args: Mapping[str, Any]
    positional: int = 0  # how many positional arguments it receives besides
    is_called: bool = True  # False: a function that is passed on; arguments may be missing
    is_reference: bool = False  # a class or function that is passed on without arguments


class _ObjectChecker:
    def __init__(self, config: Any, tree: ConfigTree, trust: Trust) -> None:
        self._config, self._tree, self._trust = config, tree, trust
        self._problems = ProblemList()
        self._targets: Targets = {}

    def check(self) -> Targets:
        specs = list(self._specs())
        classes = self._config.trainer.hooks.hook_classes
        names = [(("trainer", "hooks", "hook_classes", i), name) for i, name in enumerate(classes)]
        hook_paths = [*self._paths(self._hook_names()), *self._paths(names)]
        self._import_trusted([*((spec.path_key, spec.path) for spec in specs), *hook_paths])
        for spec in specs:
            if spec.path in self._targets and not spec.is_reference:
                self._check_arguments(spec, self._targets[spec.path])
        self._check_options()
        self._check_consistency()
        self._problems.raise_any()
        return self._targets

    def check_hooks(self) -> None:
        self._import_trusted(list(self._paths(self._hook_names())))
        self._check_options()
        self._problems.raise_any()

    def _import_trusted(self, paths: list[tuple[Key, str]]) -> None:
        """Import classes and functions, if all of them are trusted."""
        for key, path in paths:
            self._add_problem(key, self._trust.find_problem(path))
        self._problems.raise_any()
        for key, path in paths:
            self._resolve(key, path)

    def _check_options(self) -> None:
        for hook_key, kind, hook in iterate_hooks(self._config):
            self._check_hook(hook_key, kind, hook)

    def _add_problem(self, key: Key, text: str | None) -> None:
        if text is not None:
            self._problems.append(self._tree.problem(key, text))

    def _specs(self) -> Iterator[_ObjectSpec]:
        """Yield every object, including objects within objects."""
        for name, section in self._config.model_dump(include=set(_SECTIONS)).items():
            yield from self._specs_within(section, (name,))
        for key, _, hook in iterate_hooks(self._config):
            for name, value in hook.item().items():
                yield from self._specs_within(value, (*key, name), is_argument=True)

    def _specs_within(
        self, value: Any, key: Key, *, is_argument: bool = False
    ) -> Iterator[_ObjectSpec]:
        """Yield the objects within a section or an argument; malformed ones are problems."""
        if isinstance(value, list):
            value = dict(enumerate(value))
        if not isinstance(value, Mapping):
            return
        is_object = "class_path" in value  # not a mapping of loaders by name
        if is_object:
            if is_argument:
                try:
                    value = validate_as(InnerObject, value, self._tree, key).model_dump()
                except FileError as error:
                    self._problems.extend(error.problems)
                    return
            yield self._make_spec(value, key, is_argument)
        if is_object and value.get("loader") is not None and not is_argument:
            loader: Key = (*key, "loader")
            yield _ObjectSpec(loader, "torch.utils.data.DataLoader", loader, value["loader"], 1)
        for name, inner in value.items():
            is_inside = is_argument or (is_object and name in ("init_args", "loader", "groups"))
            yield from self._specs_within(inner, (*key, name), is_argument=is_inside)

    def _make_spec(self, value: Mapping[str, Any], key: Key, is_argument: bool) -> _ObjectSpec:
        positional = int(key[0] in ("optimizer", "scheduler") and not is_argument)
        is_called = is_argument or not str(key[0]).endswith("_fn")
        return _ObjectSpec(
            *((*key, "class_path"), value["class_path"], (*key, "init_args"), value["init_args"]),
            positional=positional,
            is_called=is_called,
            is_reference=not value.get("call", True),
        )

    def _hook_names(self) -> Iterator[tuple[Key, str]]:
        """Yield the name or class path of every hook of the section `hooks`."""
        for key, _, hook in iterate_hooks(self._config):
            given_as = "name" if hook.class_path is None else "class_path"
            yield (*key, given_as), str(getattr(hook, given_as))

    def _paths(self, names: Iterable[tuple[Key, str]]) -> Iterator[tuple[Key, str]]:
        """Yield the class paths of hooks."""
        for key, name in names:
            try:
                yield key, find_hook(name).path
            except HooklineError as error:
                self._add_problem(key, str(error))

    def _resolve(self, key: Key, path: str) -> None:
        """Import the class or function of a class path."""
        if path in self._targets:
            return
        try:
            target = load_object(path)
        except LookupError as error:
            self._add_problem(key, f"'{path}': {error}")
            return
        problem = self._trust.find_problem(path) or self._trust.find_target_problem(path, target)
        self._add_problem(key, problem)
        if problem is None:
            self._targets[path] = target

    def _check_arguments(self, spec: _ObjectSpec, target: Any) -> None:
        name = spec.path.rpartition(".")[2]
        is_called = spec.is_called or isinstance(target, type)
        found = find_argument_problems(name, target, spec.args, spec.positional, is_called)
        for argument, text in found:
            self._add_problem((*spec.args_key, argument), text)

    def _check_hook(self, key: Key, kind: str | None, hook: HookConfig) -> None:
        """Load a hook's class and check its options."""
        item = hook.item()
        options = {name: value for name, value in item.items() if name != "class_path"}
        try:  # options that contain objects are checked when these have been created
            HookItem.read(item, kind, check_values=not _contains_object(options))
        except OptionsError as error:
            for problem in error.problems:
                is_inside = problem.option in (hook.init_args or {})
                option_key = (*key, *(["init_args"] if is_inside else []), problem.option)
                self._add_problem(option_key, f"{error.class_name}: {problem.text}")
        except (HooklineError, ValueError, TypeError) as error:
            self._add_problem(key, str(error))

    def _check_consistency(self) -> None:
        """Compare sections that depend on each other."""
        config, trainer_seed = self._config, self._config.trainer.seed
        if config.loss_fn is not None and config.step_fn is not None:
            text = "`loss_fn` is given, too, and would not be called. Keep one of them."
            self._add_problem(("step_fn",), text)
        if None not in (config.seed, trainer_seed) and trainer_seed != config.seed:
            text = f"It is {trainer_seed}, but `seed` is {config.seed}. Keep one of them."
            self._add_problem(("trainer", "seed"), text)
        optimizers = len(list(iterate_section(config, "optimizer")))
        for key, scheduler in iterate_section(config, "scheduler"):
            if scheduler.optimizer >= optimizers:
                count = f"there are {optimizers} optimizers, counted from 0"
                text = f"It is {scheduler.optimizer}, but {count}."
                self._add_problem((*key, "optimizer"), text)


# -- arguments ------------------------------------------------------------------------------------


def find_argument_problems(
    name: str, target: Any, args: Mapping[str, Any], positional: int = 0, is_called: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield each argument that does not match a signature, and why.

    Args:
        name: the class or function in messages.
        target: the class or function.
        args: its arguments by name.
        positional: how many positional arguments it receives besides.
        is_called: False for a function that is passed on; arguments may be missing.
    """
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = [one.name for one in parameters if one.kind in by_position][:positional]
    known = {one.name: one for one in parameters if one.kind in by_name and one.name not in taken}
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for argument, value in args.items():
        if argument in known:
            problem = _find_value_problem(target, known[argument], value)
            if problem is not None:
                yield argument, problem
        elif argument in taken:
            yield (
                argument,
                f"The argument '{argument}' of {name} is passed automatically. Remove it.",
            )
        elif not open_ended:
            valid = f"The arguments are: {', '.join(known)}." if known else "It has no arguments."
            hint = nearest(argument, known)
            yield argument, f"{name} has no argument '{argument}'.{hint} {valid}"
    for argument, parameter in known.items():
        if is_called and parameter.default is parameter.empty and argument not in args:
            yield argument, f"{name} requires the argument '{argument}'."
            return


def _find_value_problem(target: Any, parameter: inspect.Parameter, value: Any) -> str | None:
    """Return why a value does not match its annotation; values with objects are not checked."""
    if _contains_object(value) or value == parameter.default:
        return None
    try:
        hint = _read_hint(target, parameter.name)
        if hint is None:
            return None
        problem = Option(parameter.name, "", parameter.default, "", hint).find_problem(value)
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
