"""Which parameters of a model are meant: parts of names, globs, regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch

from hookline.errors import ConfigError, listed

__all__ = ["chosen_names", "matching", "named_parameters", "parameters_by_name"]

_NAMED = 8  # so many names stand in an error


def named_parameters(model: torch.nn.Module, patterns: Sequence[str] | None) -> dict[int, str]:
    """Return the names of the parameters that a pattern matches, by the parameter's `id`.

    Without patterns these are all parameters.

    Raises:
        ConfigError: A pattern matches no name.
    """
    names = _names(model)
    chosen = matching(model, patterns) if patterns else None
    return {key: of[0] for key, of in names.items() if chosen is None or of[0] in chosen}


def matching(
    model: torch.nn.Module, patterns: Sequence[str], others: Iterable[str] = ()
) -> set[str]:
    """Return the names of the parameters that a pattern matches; of a tied one the first.

    Args:
        model: whose parameters.
        patterns: parts of names, globs or regular expressions; of a tied one any name may match.
        others: names of parameters that are not the model's.

    Raises:
        ConfigError: A pattern matches no name.
    """
    first = {name: of[0] for of in _names(model).values() for name in of}
    for name in others:
        first.setdefault(name, name)
    return {first[name] for name in chosen_names(patterns, list(first))}


def _names(model: torch.nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its `id`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(_plain_name(model, name))
    return names


def parameters_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return a model's parameters by their names, without what wrappers put into these."""
    return {_plain_name(model, name): one for name, one in model.named_parameters()}


def _plain_name(model: torch.nn.Module, name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        name = name.removeprefix("module.")
    return name.replace("_orig_mod.", "")


def chosen_names(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that one of the patterns matches, in their order.

    Raises:
        ConfigError: A pattern matches no name.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = _matching(pattern, names)
        if not found:
            raise ConfigError(_matches_nothing(pattern, names))
        chosen.update(found)
    return [name for name in names if name in chosen]


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that the pattern matches, by the first way of reading it that matches any."""
    part = [name for name in names if pattern in name]
    glob = part or [name for name in names if fnmatchcase(name, pattern)]
    try:
        return glob or [name for name in names if re.search(pattern, name)]
    except re.error:
        return []


def _matches_nothing(pattern: str, names: Sequence[str]) -> str:
    parts = {".".join(name.split(".")[:end]) for name in names for end in range(1, 9)}
    parts |= {part for name in names for part in name.split(".")}
    close = get_close_matches(pattern, sorted(parts), n=3, cutoff=0.6)
    near = f" Near it: {listed(close)}." if close else ""
    return (
        f"No parameter matches '{pattern}', neither as a part of its name, nor as a "
        f"glob, nor as a regular expression.{near} The parameters are: {listed(names[:_NAMED])}"
        + (f" and {len(names) - _NAMED} more." if len(names) > _NAMED else ".")
    )
