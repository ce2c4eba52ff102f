"""Everything that can be said of a configuration before anything is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hookline.config import SECTIONS, find_hook
from hookline.config.hook_items import HookItem
from hookline.config_files.file_model import HookConfig, TrainingConfig
from hookline.config_files.merging import Merged
from hookline.config_files.object_specs import (
    Spec,
    argument_problems,
    holds_object,
    hooks_in,
    specs_of,
)
from hookline.config_files.problems import FileError, Key, Problem
from hookline.config_files.trust import Trust, load_object
from hookline.errors import HooklineError
from hookline.options import OptionsError

__all__ = ["ResolvedObjects", "check_objects"]


@dataclass
class ResolvedObjects:
    """What a configuration names, imported and checked.

    Attributes:
        targets: the class or function of each class path.
        hooks: the hooks whose options are complete, by key. A hook with objects among its options
            is missing here: its options can only be checked when the objects exist.
    """

    targets: dict[str, Any] = field(default_factory=dict[str, Any])
    hooks: dict[Key, HookItem] = field(default_factory=dict[Key, HookItem])


def check_objects(config: TrainingConfig, merged: Merged, trust: Trust) -> ResolvedObjects:
    """Find every class that is named, and compare arguments with signatures.

    Modules are imported only when all class paths are trusted, and nothing is called.

    Raises:
        FileError: names everything that is not trusted, not found, or does not fit.
    """
    problems: list[Problem] = []
    specs = list(specs_of(config, merged, problems))
    for spec in specs:
        refusal = trust.refusal(spec.path)
        if refusal is not None:
            problems.append(merged.problem(_path_key(spec), refusal))
    hooks = list(_hook_paths(config, merged, problems))
    for key, path in hooks:
        refusal = trust.refusal(path)
        if refusal is not None:
            problems.append(merged.problem(key, refusal))
    _raise(problems)
    resolved = ResolvedObjects()
    targets = resolved.targets
    for spec in specs:
        _find(targets, spec.path, _path_key(spec), merged, trust, problems)
        if spec.path in targets and not spec.itself:
            problems += argument_problems(spec, targets[spec.path], merged)
    for key, path in hooks:
        _find(targets, path, key, merged, trust, problems)
    for key, section, hook in hooks_in(config):
        _check_hook(resolved, key, section, hook, merged, problems)
    _check_sense(config, merged, problems)
    _raise(problems)
    return resolved


def _raise(problems: list[Problem]) -> None:
    if problems:
        raise FileError(list(dict.fromkeys(problems)))


def _path_key(spec: Spec) -> Key:
    return spec.key if spec.key[-1] == "loader" else (*spec.key, "class_path")


def _find(
    targets: dict[str, Any],
    path: str,
    key: Key,
    merged: Merged,
    trust: Trust,
    problems: list[Problem],
) -> None:
    if path in targets:
        return
    try:
        loaded = load_object(path)
    except LookupError as error:
        problems.append(merged.problem(key, f"'{path}': {error}"))
        return
    refusal = trust.refusal(path) or trust.refusal_of(path, loaded)
    if refusal is not None:
        problems.append(merged.problem(key, refusal))
    else:
        targets[path] = loaded


# -- hooks ----------------------------------------------------------------------------------------


def _hook_paths(
    config: TrainingConfig, merged: Merged, problems: list[Problem]
) -> Iterator[tuple[Key, str]]:
    """The class path of every hook, those of the section `trainer` included."""
    named: list[tuple[Key, str]] = []
    for key, _, hook in hooks_in(config):
        which = "name" if hook.class_path is None else "class_path"
        named.append(((*key, which), str(getattr(hook, which))))
    for i, name in enumerate(config.trainer.hooks.hook_classes):
        named.append((("trainer", "hooks", "hook_classes", i), name))
    for key, name in named:
        try:
            yield key, find_hook(name).path
        except HooklineError as error:
            problems.append(merged.problem(key, str(error)))


def _check_hook(
    resolved: ResolvedObjects,
    key: Key,
    section: str | None,
    hook: HookConfig,
    merged: Merged,
    problems: list[Problem],
) -> None:
    """Load a hook's class and check its options."""
    item = hook.item()
    kind = None if section is None else SECTIONS[section]
    has_objects = holds_object(item)
    try:
        checked = HookItem.read(item, kind, check_values=not has_objects)
        if not has_objects:
            resolved.hooks[key] = checked
    except OptionsError as error:
        for one in error.problems:
            inside = ("init_args",) if one.option in (hook.init_args or {}) else ()
            text = f"{error.class_name}: {one.text}"
            problems.append(merged.problem((*key, *inside, one.option), text))
    except (HooklineError, ValueError, TypeError) as error:
        problems.append(merged.problem(key, str(error)))


# -- what belongs together ------------------------------------------------------------------------


def _check_sense(config: TrainingConfig, merged: Merged, problems: list[Problem]) -> None:
    if config.loss_fn is not None and config.step_fn is not None:
        text = "There is a `loss_fn`, too, which would not be called. Give one of them."
        problems.append(merged.problem(("step_fn",), text))
    other = config.trainer.seed
    if config.seed is not None and other is not None and other != config.seed:
        text = f"It is {other}, and `seed` is {config.seed}. Give one of them."
        problems.append(merged.problem(("trainer", "seed"), text))
    optimizers = len(config.optimizer) if isinstance(config.optimizer, list) else 1
    schedulers = config.scheduler if isinstance(config.scheduler, list) else [config.scheduler]
    for i, one in enumerate(schedulers):
        if one is not None and one.optimizer >= optimizers:
            key = ("scheduler", i) if isinstance(config.scheduler, list) else ("scheduler",)
            text = f"It is {one.optimizer}, and there are {optimizers}, counted from 0."
            problems.append(merged.problem((*key, "optimizer"), text))
