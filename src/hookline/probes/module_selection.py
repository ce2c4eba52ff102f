"""Choosing modules of a model: by name, glob, regular expression, type, predicate or themselves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeAlias, Union, get_origin

from torch import nn

from hookline.arguments import check_function, show_value
from hookline.errors import ConfigError, listed
from hookline.tensors.name_patterns import (
    ModulePlace,
    clean_name,
    compile_regex,
    explain_mismatch,
    list_names,
    matches_glob,
    module_class,
    module_places,
)

Predicate: TypeAlias = Callable[[str, nn.Module], object]

Several: TypeAlias = list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any]
Which: TypeAlias = str | re.Pattern[str] | type | UnionType | nn.Module | Predicate | Several
"""The ways to choose modules; see `select`."""


def check_model(model: Any) -> None:
    """Raise if this is not a model."""
    if not isinstance(model, nn.Module):
        described = "None" if model is None else f"a {type(model).__name__}"
        raise ConfigError(
            f"Probes are attached to modules of a torch.nn.Module, not of {described}."
        )


def select(model: nn.Module, which: Which) -> dict[str, nn.Module]:
    """Return the chosen modules by name, in the model's order.

    Args:
        model: The model, wrapped or not.
        which: One of these, or a list of them for all modules that any of them chooses:

            - a name: `"blocks.3.mlp"`; `""` is the model itself. Names with the parts that wrappers
              add work too;
            - a glob: `*` stands for one part of a name, or for a piece within a part, and never for
              a dot; `**` for any number of parts, none included; `?` for one character, `[0-3]` for
              one of several. So `"blocks.*.mlp"` chooses each block's `mlp`, `"**.mlp"` every `mlp`
              at any depth, `"**"` all modules and the model itself;
            - a regular expression that matches whole names: a compiled one, or `"re:…"`;
            - a type, or a union of types: all its modules, subclasses included;
            - a function of name and module that returns whether to choose it;
            - a module of the model.

    A tied module is chosen once, under the first of its names that matches.

    Raises:
        ConfigError: An item of `which` chooses no module.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> list(select(model, nn.Linear))
        ['0', '2']
    """
    check_model(model)
    places = module_places(model)
    order = {id(place): position for position, place in enumerate(places)}
    chosen: dict[int, ModulePlace] = {}
    for item in which if isinstance(which, list | tuple | set | frozenset) else [which]:
        found = _find(places, item)
        if not found:
            raise ConfigError(_describe_mismatch(places, item))
        for place in found:
            chosen.setdefault(id(place.module), place)
    if not chosen:
        raise ConfigError(
            f"No modules were given: got {show_value(which)}. Give at least one name or type."
        )
    in_order = sorted(chosen.values(), key=lambda place: order[id(place)])
    return {place.name: place.module for place in in_order}


def _find(places: list[ModulePlace], item: Any) -> list[ModulePlace]:
    """Return the places that an item chooses, each module once."""
    if isinstance(item, nn.Module):
        return [place for place in places if place.module is item][:1]
    if isinstance(item, str) and not item.startswith("re:"):
        return _find_by_name(places, item)
    if isinstance(item, str | re.Pattern):
        matches = compile_regex(item).fullmatch
        return _filter(places, lambda place: matches(place.name))
    if _is_type(item):
        return _filter(places, lambda place: isinstance(place.module, item))
    if callable(item):
        check_function("The function that chooses modules", item, "name", "module")
        return _filter(places, lambda place: item(place.name, place.module))
    raise ConfigError(
        f"Modules cannot be chosen by a {type(item).__name__}: {show_value(item)}. Give a name, a "
        "glob, a regular expression, a type, a function of name and module, a module, or a list of "
        "these."
    )


def _is_type(item: Any) -> bool:
    return isinstance(item, type | UnionType) or get_origin(item) is Union


def _filter(
    places: list[ModulePlace], matches: Callable[[ModulePlace], object]
) -> list[ModulePlace]:
    found: dict[int, ModulePlace] = {}
    for place in places:
        if not place.is_wrapper and id(place.module) not in found and matches(place):
            found[id(place.module)] = place
    return list(found.values())


def _find_by_name(places: list[ModulePlace], text: str) -> list[ModulePlace]:
    """Match clean names; if none matches, read the text as a name with parts of wrappers."""
    clean = clean_name(text)
    # The last is a name from a DDP model, for the unwrapped model.
    for pattern in dict.fromkeys((text, clean, clean.removeprefix("module").lstrip("."))):
        if found := _filter(places, _make_matcher(places, pattern)):
            return found
    return _filter(places, lambda place: matches_glob(text, place.full_name))


def _make_matcher(places: list[ModulePlace], text: str) -> Callable[[ModulePlace], object]:
    if any(place.name == text for place in places):  # also a name with brackets or stars in it
        return lambda place: place.name == text
    return lambda place: matches_glob(text, place.name)


def _describe_mismatch(places: list[ModulePlace], item: Any) -> str:
    """Return a message that an item chooses no module, with the names or types there are."""
    names = list(dict.fromkeys(place.name for place in places if place.name))
    if isinstance(item, nn.Module):
        problem = f"This {type(item).__name__} is not a part of the model."
    elif _is_type(item):
        types = Counter(
            module_class(place.module).__name__ for place in places if not place.is_wrapper
        )
        problem = f"No module of the model is a {getattr(item, '__name__', item)}."
        return f"{problem} Its types are: {listed(types)}."
    elif isinstance(item, str):
        problem = f"No module matches {show_value(item)}.{explain_mismatch(item, names)}"
    elif isinstance(item, re.Pattern):
        problem = (
            f"No module's whole name matches the regular expression {show_value(item.pattern)}."
        )
    else:
        problem = f"{getattr(item, '__qualname__', item)} chose none of the modules."
    if not names:
        return f"{problem} The model has no parts: choose the model itself, with ''."
    return f"{problem} The modules are: {list_names(names)}."
