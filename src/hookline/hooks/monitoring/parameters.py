"""Which parameters of a model are meant: parts of names, globs, regular expressions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch

from hookline.errors import ConfigError, listed

__all__ = ["chosen_names", "named_parameters"]

_NAMED = 8  # so many names stand in an error


def named_parameters(model: torch.nn.Module, patterns: Sequence[str] | None) -> dict[int, str]:
    """Return the names of the parameters that a pattern matches, by the parameter's `id`.

    Without patterns these are all parameters.

    Raises:
        ConfigError: A pattern matches no name.
    """
    names = {
        id(parameter): _plain_name(model, name) for name, parameter in model.named_parameters()
    }
    if not patterns:
        return names
    chosen = set(chosen_names(patterns, list(names.values())))
    return {key: name for key, name in names.items() if name in chosen}


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
        f"param_filter: no parameter matches '{pattern}', neither as a part of its name, nor as a "
        f"glob, nor as a regular expression.{near} The parameters are: {listed(names[:_NAMED])}"
        + (f" and {len(names) - _NAMED} more." if len(names) > _NAMED else ".")
    )
