"""Choosing modules of a model: by name, glob, regular expression, type, predicate or themselves.

Names are those of the model as its author wrote it: what `torch.compile`, DDP, FSDP and activation
checkpointing put around modules does not show in them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from types import UnionType
from typing import Any, NamedTuple, TypeAlias, Union, get_origin

from torch import nn

from hookline.errors import ConfigError, listed, nearest

__all__ = ["Which", "aliases", "check_model", "clean_name", "clean_names", "select"]

Predicate: TypeAlias = Callable[[str, nn.Module], object]

Which: TypeAlias = (
    str
    | re.Pattern[str]
    | type
    | UnionType
    | nn.Module
    | Predicate
    | list[Any]
    | tuple[Any, ...]
    | set[Any]
    | frozenset[Any]
)
"""What `select` takes."""

_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
)
"""Where each wrapper's class stands, and under which name it holds the module."""

_UNMISTAKABLE = {part for *_, part in _WRAPPERS if part.startswith("_")}
_SHOWN = 8  # names in a message


class _Place(NamedTuple):
    """A place in the tree of modules. A tied module stands at several."""

    name: str
    """Without the parts that wrappers add."""
    full: str
    """As `named_modules` has it."""
    module: nn.Module
    wraps: bool
    """Whether it is only a wrapper of the module with the same name."""


def check_model(model: Any) -> None:
    """Raise where this is no model."""
    if not isinstance(model, nn.Module):
        what = "None" if model is None else f"a {type(model).__name__}"
        raise ConfigError(f"Probes are put on the modules of a torch.nn.Module, not on {what}.")


def clean_name(name: str) -> str:
    """Return a module's name without the parts that only wrappers add.

    `module`, which DDP adds, stays: it may be somebody's own attribute. `clean_names` can tell.
    """
    return ".".join(part for part in name.split(".") if part not in _UNMISTAKABLE)


def clean_names(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's modules by name, in its order, each once; the model itself is `""`.

    A wrapped module is there, its wrapper is not. A tied module has its first name; see `aliases`.
    """
    seen: set[int] = set()
    names: dict[str, nn.Module] = {}
    for place in _places(model):
        if not place.wraps and id(place.module) not in seen:
            seen.add(id(place.module))
            names[place.name] = place.module
    return names


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each tied module, its other names by its first one."""
    names: dict[int, list[str]] = {}
    for place in _places(model):
        if not place.wraps:
            names.setdefault(id(place.module), []).append(place.name)
    return {first: others for first, *others in names.values() if others}


def select(model: nn.Module, which: Which) -> dict[str, nn.Module]:
    """Return the chosen modules by name, in the model's order.

    Args:
        model: The model, wrapped or not.
        which: One of these, or a list of them for all that any of them chooses:

            - a name: `"blocks.3.mlp"`; `""` is the model itself. Names with the parts that wrappers
              add are understood too;
            - a glob: `*` stands for one part of a name, or for a piece within a part, and never for
              a dot; `**` for any number of parts, none included; `?` for one character, `[0-3]` for
              one of several. So `"blocks.*.mlp"` chooses each block's `mlp`, `"**.mlp"` every `mlp`
              at any depth, `"**"` all modules and the model itself;
            - a regular expression that matches whole names: a compiled one, or `"re:…"`;
            - a type, or a union of some: all its modules, subclasses included;
            - a function of name and module that says whether to choose it;
            - a module of the model.

    A tied module is chosen once, under the first of its names that was asked for.

    Raises:
        ConfigError: Something that was asked for chooses nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> list(select(model, nn.Linear))
        ['0', '2']
    """
    places = _places(model)
    order = {id(place): position for position, place in enumerate(places)}
    chosen: dict[int, _Place] = {}
    for one in _each(which):
        found = _find(places, one)
        if not found:
            raise ConfigError(_nothing(places, one))
        for place in found:
            chosen.setdefault(id(place.module), place)
    if not chosen:
        raise ConfigError(
            f"No module was asked for: got {which!r}. Give at least one name or type."
        )
    in_order = sorted(chosen.values(), key=lambda place: order[id(place)])
    return {place.name: place.module for place in in_order}


def _places(model: nn.Module) -> list[_Place]:
    check_model(model)
    # Looked up, not imported: whoever uses a wrapper has imported it, and some take long.
    known = [
        (kind, part)
        for home, name, part in _WRAPPERS
        if (kind := getattr(sys.modules.get(home), name, None)) is not None
    ]
    return list(_walk(model, "", "", known, ()))


def _walk(
    module: nn.Module,
    name: str,
    full: str,
    known: list[tuple[type, str]],
    above: tuple[nn.Module, ...],
) -> Iterator[_Place]:
    children = {part: child for part, child in module._modules.items() if child is not None}
    wrapped = next((part for kind, part in known if isinstance(module, kind)), None)
    yield _Place(name, full, module, wraps=wrapped in children)
    above = (*above, module)
    for part, child in children.items():
        if not any(child is other for other in above):  # a module that contains itself
            inner = name if part == wrapped else f"{name}.{part}".lstrip(".")
            yield from _walk(child, inner, f"{full}.{part}".lstrip("."), known, above)


def _each(which: Any) -> Iterator[Any]:
    if isinstance(which, list | tuple | set | frozenset):
        for one in which:
            yield from _each(one)
    else:
        yield which


def _find(places: list[_Place], one: Any) -> list[_Place]:
    """Return the places that one wish chooses, each module once."""
    if isinstance(one, nn.Module):
        return [place for place in places if place.module is one][:1]
    if isinstance(one, str) and not one.startswith("re:"):
        return _by_name(places, one)
    if isinstance(one, str | re.Pattern):
        matches = _regex(one).fullmatch
        return _where(places, lambda place: matches(place.name)) or _by_full_name(places, matches)
    if _is_type(one):
        return _where(places, lambda place: isinstance(place.module, one))
    if callable(one):
        return _where(places, lambda place: one(place.name, place.module))
    raise ConfigError(
        f"Modules cannot be chosen by a {type(one).__name__}: {one!r}. Give a name, a glob, a "
        "regular expression, a type, a function of name and module, a module, or a list of these."
    )


def _is_type(one: Any) -> bool:
    return isinstance(one, type | UnionType) or get_origin(one) is Union


def _where(places: list[_Place], wanted: Callable[[_Place], object]) -> list[_Place]:
    found: dict[int, _Place] = {}
    for place in places:
        if not place.wraps and id(place.module) not in found and wanted(place):
            found[id(place.module)] = place
    return list(found.values())


def _by_name(places: list[_Place], text: str) -> list[_Place]:
    """Match the clean names; only where none does, read the text as one that has wrapper parts."""
    for wish in dict.fromkeys((text, clean_name(text))):
        if found := _where(places, _matcher(places, wish)):
            return found
    if found := _by_full_name(places, lambda name: _glob(text, name)):
        return found
    first, _, rest = text.partition(".")  # named in a DDP model, looked for in the model itself
    return _where(places, _matcher(places, rest)) if first == "module" else []


def _by_full_name(places: list[_Place], matches: Callable[[str], object]) -> list[_Place]:
    names = {
        place.name
        for place in places
        if place.full and (matches(place.full) or matches(clean_name(place.full)))
    }
    return _where(places, lambda place: place.name in names)


def _matcher(places: list[_Place], text: str) -> Callable[[_Place], object]:
    if any(place.name == text for place in places):  # also one with brackets or stars in it
        return lambda place: place.name == text
    return lambda place: _glob(text, place.name)


def _glob(pattern: str, name: str) -> bool:
    return _parts_match(_parts(pattern), _parts(name))


def _parts(name: str) -> list[str]:
    return name.split(".") if name else []


def _parts_match(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    first, *rest = pattern
    if first == "**":
        return any(_parts_match(rest, name[skipped:]) for skipped in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], first) and _parts_match(rest, name[1:])


def _regex(one: str | re.Pattern[str]) -> re.Pattern[str]:
    if isinstance(one, re.Pattern):
        return one
    try:
        return re.compile(one.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(f"{one!r} is not a regular expression: {error}.") from error


def _nothing(places: list[_Place], one: Any) -> str:
    """Say that nothing was found, and what there is."""
    names = list(dict.fromkeys(place.name for place in places if place.name))
    if isinstance(one, nn.Module):
        start = f"This {type(one).__name__} is not a part of the model."
    elif _is_type(one):
        start = f"No module of the model is a {getattr(one, '__name__', one)}."
        kinds = Counter(type(place.module).__name__ for place in places if not place.wraps)
        return f"{start} Its types: {listed(kinds)}."
    elif isinstance(one, str):
        start = f"No module matches {one!r}.{_hint(one, names)}"
    elif isinstance(one, re.Pattern):
        start = f"No module's whole name matches the regular expression {one.pattern!r}."
    else:
        start = f"{getattr(one, '__qualname__', one)} chose none of the modules."
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{start} Names there are: {listed(names[:_SHOWN])}{more}."


def _hint(text: str, names: list[str]) -> str:
    if text.startswith("re:"):
        return " It has to match the whole name."
    across = next((name for name in names if "*" in text and fnmatchcase(name, text)), None)
    if across is not None:
        return (
            f" '*' stands for one part of a name, and '{across}' has more: write '**' for any "
            "number of parts."
        )
    return nearest(text, names)
