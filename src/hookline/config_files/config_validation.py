"""Validation of a configuration: its keys and values, then the objects it names.

`validate` compares the merged configuration with the models; nothing is imported. `check_objects`
imports what class paths name, and compares arguments with signatures; nothing is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from pydantic import ValidationError

from hookline.config.config_model import UNKNOWN_FIELD_ERRORS, describe_fields
from hookline.config.hook_items import HookItem
from hookline.config.hook_names import find_hook
from hookline.config_files.config_tree import (
    MAX_PROBLEMS,
    ConfigTree,
    FileError,
    Key,
    Problem,
    ProblemList,
    format_key,
    format_name,
    format_value,
)
from hookline.config_files.file_model import (
    TAGS,
    TRACKER_NAME,
    HookConfig,
    HooksByKind,
    TrainingConfig,
)
from hookline.config_files.object_specs import (
    ObjectSpec,
    contains_object,
    find_argument_problems,
    iterate_hooks,
    iterate_section,
    iterate_specs,
)
from hookline.config_files.project import VARIABLE
from hookline.config_files.trust import Trust, load_object
from hookline.errors import HooklineError, nearest
from hookline.options import OptionsError

__all__ = ["ResolvedObjects", "check_objects", "validate"]

_OPEN_SECTIONS = ("init_args", "loader", "hparams")  # mappings with keys of any name
_TRUST_IN_FILE = (
    "A config file does not decide which packages are trusted. Pass `--trust PACKAGE`, set "
    f"{VARIABLE}=PACKAGE, or set `trust` under `[tool.hookline]` in the project's pyproject.toml; "
    "from Python, call load_training(…, trust=[…])."
)


# -- keys and values ------------------------------------------------------------------------------


def validate(tree: ConfigTree) -> TrainingConfig:
    """Return the configuration as a `TrainingConfig`.

    Raises:
        FileError: names every unknown, missing or invalid key.
    """
    if "trust" in tree.values:
        raise FileError([tree.problem(("trust",), _TRUST_IN_FILE)])
    try:
        return TrainingConfig.model_validate(tree.values)
    except ValidationError as error:
        found = error.errors(include_url=False)
    raise FileError([_describe(tree, dict(one)) for one in found[:MAX_PROBLEMS]], len(found))


def _describe(tree: ConfigTree, error: dict[str, Any]) -> Problem:
    path: Key = error["loc"]
    key = tuple(part for part in path if part not in TAGS)
    if error["type"] in UNKNOWN_FIELD_ERRORS:
        name, known = str(path[-1]), _fields_at(path[:-1])
        hint = f" The keys here are: {', '.join(known)}." if known else ""
        hint = _indentation_hint(tree, path, key) or f"{nearest(name, known)}{hint}"
        return tree.problem(key, f"Unknown key '{format_name(name)}'.{hint}")
    if error["type"] == "missing":
        meaning = _fields_at(path[:-1]).get(str(path[-1]), "")
        file, line = tree.place(key[:-1])  # the place of the mapping that lacks the key
        hint = f" Expected {meaning}." if meaning else ""
        return Problem(file, line, format_key(key), f"The key is missing.{hint}")
    return tree.problem(key, f"It is {format_value(error['input'], key)}. {_expectation(error)}.")


def _indentation_hint(tree: ConfigTree, path: Key, key: Key) -> str:
    """Return where an unknown key belongs, if it is a known key of another indentation."""
    name = str(key[-1])
    siblings: Any = tree.values
    for part in key[:-1]:
        siblings = siblings[part]
    for above in takewhile(lambda sibling: sibling != name, siblings):
        is_empty = siblings[above] is None
        if is_empty and (above in _OPEN_SECTIONS or name in _fields_at((*path[:-1], above))):
            return f" If it belongs to '{above}', which is empty, indent it below that key."
    if len(key) > 1 and name in TrainingConfig.model_fields:
        return f" If it is the section '{name}' of the file, do not indent it."
    return ""


def _expectation(error: dict[str, Any]) -> str:
    context = error.get("ctx", {})
    if error["type"] == "model_type":
        is_union = context["class_name"] == HooksByKind.__name__
        is_dashed = is_union and str(error["input"]).startswith("-")
        hint = ", whose items have a space after the dash" if is_dashed else ""
        hint = f" or a list{hint}" if is_union else ""
        return f"Expected a mapping{hint}{_colon_hint(error['input'])}"
    if error["type"] == "dict_type":
        return f"Expected a mapping{_colon_hint(error['input'])}"
    if error["type"] == "string_pattern_mismatch" and context["pattern"] == TRACKER_NAME:
        return "Expected the name of a tracker, one of Hookline's or of an installed package"
    if error["type"] == "string_pattern_mismatch":
        return "Expected a class path, `package.module.Name`"
    if error["type"] == "value_error":  # raised by a validator of the models
        return str(context["error"])
    return str(error["msg"])


def _colon_hint(value: Any) -> str:
    """Return that a colon or its space is missing, if a value looks like a key and its value."""
    words = value.split() if isinstance(value, str) else []
    name, colon, rest = words[0].partition(":") if words else ("", "", "")
    if name.isidentifier() and colon and rest:
        return f". A space is missing after the colon: `{format_name(name)}: {format_name(rest)}`"
    if len(words) < 2 or not words[0].isidentifier():
        return ""
    return f". A colon is missing: `{format_name(words[0])}: {format_name(words[1])}`"


def _fields_at(path: Key) -> dict[str, str]:
    if path[:2] == ("hooks", "(one)"):
        return describe_fields(HooksByKind, path[2:])
    return describe_fields(TrainingConfig, path)


# -- objects --------------------------------------------------------------------------------------


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
    """Import every class that is named, and compare arguments with signatures.

    Modules are imported only if all class paths are trusted.

    Raises:
        FileError: names everything that is not trusted, not found, or does not match.
    """
    return _ObjectChecker(config, tree, trust).check()


class _ObjectChecker:
    def __init__(self, config: TrainingConfig, tree: ConfigTree, trust: Trust) -> None:
        self._config, self._tree, self._trust = config, tree, trust
        self._problems = ProblemList()
        self._resolved = ResolvedObjects()

    def check(self) -> ResolvedObjects:
        specs = list(iterate_specs(self._config, self._tree, self._problems))
        hook_paths = list(self._hook_paths())
        for key, path in [*((_path_key(spec), spec.path) for spec in specs), *hook_paths]:
            self._add_problem(key, self._trust.find_problem(path))
        self._problems.raise_any()
        for spec in specs:
            self._resolve(_path_key(spec), spec.path)
            if spec.path in self._resolved.targets and not spec.is_reference:
                target = self._resolved.targets[spec.path]
                find_argument_problems(spec, target, self._tree, self._problems)
        for key, path in hook_paths:
            self._resolve(key, path)
        for hook_key, kind, hook in iterate_hooks(self._config):
            self._check_hook(hook_key, kind, hook)
        self._check_consistency()
        self._problems.raise_any()
        return self._resolved

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
        """Yield the class path of every hook, including those of the section `trainer`."""
        names: list[tuple[Key, str]] = []
        for key, _, hook in iterate_hooks(self._config):
            given_as = "name" if hook.class_path is None else "class_path"
            names.append(((*key, given_as), str(getattr(hook, given_as))))
        for i, name in enumerate(self._config.trainer.hooks.hook_classes):
            names.append((("trainer", "hooks", "hook_classes", i), name))
        for key, name in names:
            try:
                yield key, find_hook(name).path
            except HooklineError as error:
                self._add_problem(key, str(error))

    def _check_hook(self, key: Key, kind: str | None, hook: HookConfig) -> None:
        """Load a hook's class and check its options."""
        item = hook.item()
        has_objects = contains_object(item)
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


def _path_key(spec: ObjectSpec) -> Key:
    return spec.key if spec.key[-1] == "loader" else (*spec.key, "class_path")
