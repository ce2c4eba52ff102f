"""Parameters of a model by name, and those that patterns choose.

A pattern of parameters is a part of their names; if no name has that part, a glob as for modules;
if it has characters that no glob has, or starts with `re:`, a regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from hookline.errors import ConfigError
from hookline.tensors.name_patterns import (
    clean_name,
    compile_regex,
    explain_mismatch,
    list_names,
    matches_glob,
    module_places,
)

_ONLY_IN_REGEX = re.compile(r"[\^$\\()|+{]")


def named_parameters(model: torch.nn.Module, patterns: Sequence[str] | None) -> dict[int, str]:
    """Return the names of the parameters that a pattern matches, by the parameter's `id`.

    Without patterns, return all parameters. A tied parameter has its first name. Raise
    `ConfigError` if a pattern matches no name.
    """
    names = {key: first for key, (first, *_) in _names_by_id(model).items()}
    chosen = match_parameters(model, patterns) if patterns else None
    return {key: name for key, name in names.items() if chosen is None or name in chosen}


def match_parameters(
    model: torch.nn.Module, patterns: Sequence[str], others: Iterable[str] = ()
) -> set[str]:
    """Return the names of the parameters that a pattern matches; of a tied one, the first name.

    Any name of a tied parameter may match. `others` are names of parameters outside of the model.
    Raise `ConfigError` if a pattern matches no name.
    """
    first_names = {name: names[0] for names in _names_by_id(model).values() for name in names}
    for name in others:
        first_names.setdefault(name, name)
    return {first_names[name] for name in match_names(patterns, list(first_names))}


def parameters_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return a model's parameters by name; a tied one under its first name."""
    names = _names_by_id(model)
    return {names[id(parameter)][0]: parameter for parameter in model.parameters()}


def _names_by_id(model: torch.nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, without the parts that wrappers add, by its `id`."""
    modules = {place.full_name: place.name for place in module_places(model)}
    names: dict[int, list[str]] = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        full_module, _, own_name = full_name.rpartition(".")
        module = modules[full_module] if full_module in modules else clean_name(full_module)
        names.setdefault(id(parameter), []).append(f"{module}.{own_name}".lstrip("."))
    return names


def match_names(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches, in their order; raise if a pattern matches none."""
    chosen: set[str] = set()
    for pattern in patterns:
        found = _match(pattern, names)
        if not found:
            raise ConfigError(_describe_mismatch(pattern, names))
        chosen.update(found)
    return [name for name in names if name in chosen]


def _match(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches, by the first reading of it that matches any."""
    if pattern.startswith("re:"):
        return [name for name in names if compile_regex(pattern).fullmatch(name)]
    found = [name for name in names if pattern in name]
    found = found or [name for name in names if matches_glob(pattern, name)]
    if found or not _ONLY_IN_REGEX.search(pattern):
        return found
    try:
        return [name for name in names if re.search(pattern, name)]
    except re.error:
        return []


def _describe_mismatch(pattern: str, names: Sequence[str]) -> str:
    parts = {".".join(name.split(".")[:end]) for name in names for end in range(1, 9)}
    parts |= {part for name in names for part in name.split(".")}
    candidates = [*names, *sorted(parts - set(names))]
    return (
        f"No parameter matches '{pattern}', neither as a part of its name, nor as a glob, nor as a "
        f"regular expression.{explain_mismatch(pattern, candidates)} The parameters are: "
        f"{list_names(names)}."
    )
