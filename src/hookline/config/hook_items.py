"""The hooks that a configuration lists: where each stands, and what its keys mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from hookline.config.hook_names import load_hook_class
from hookline.config.trainer_config import HooksConfig
from hookline.errors import ConfigError, nearest
from hookline.hook import Hook
from hookline.options import options_of

__all__ = ["SECTIONS", "Item", "items_of"]

SECTIONS: Mapping[str, str] = {
    "loop": "loop",
    "forward": "forward",
    "update": "update",
    "probes": "probe",
}
"""The sections of a configuration of hooks, and the kind that each is for."""

_REGISTRATION = ("every", "sample_rate", "from_epoch", "before", "after", "strict")


@dataclass(frozen=True)
class Item:
    """One hook of a configuration, taken apart."""

    name: str
    alias: str | None
    enabled: bool
    kind: type[Hook]
    options: Mapping[str, Any]
    """What it is made with."""

    registration: Mapping[str, Any]
    """What it is registered with: its schedule and its place."""

    @classmethod
    def read(cls, item: Any) -> Item:
        """Take apart what stands in a configuration, and find its class."""
        given = {"name": item} if isinstance(item, str) else item
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{item!r} is a {type(item).__name__}; expected a hook's name, or a mapping with "
                "'name' and its options."
            )
        rest = {str(key): value for key, value in cast("Mapping[Any, Any]", given).items()}
        name, alias = _names(rest)
        enabled = rest.pop("enabled", True)
        if not isinstance(enabled, bool):
            raise ConfigError(f"'enabled' is {enabled!r}; expected true or false.")
        kind = load_hook_class(name)
        options, registration = _apart(kind, rest)
        return cls(name, alias, enabled, kind, options, registration)


def _names(rest: dict[str, Any]) -> tuple[str, str | None]:
    """What the hook is, and what it is called in the run."""
    path, name, alias = (_word(rest, key) for key in ("class_path", "name", "as"))
    if path is not None and name is not None:
        if alias is not None:
            raise ConfigError("'name' and 'as' both name the hook of a 'class_path'. Keep one.")
        return path, name
    found = path if path is not None else name
    if found is None:
        hint = nearest("name", rest)
        raise ConfigError(f"There is no 'name': that of a hook, or a class path.{hint}")
    return found, alias


def _word(rest: dict[str, Any], key: str) -> str | None:
    word = rest.pop(key, None)
    if word is not None and not (isinstance(word, str) and word):
        raise ConfigError(f"'{key}' is {word!r}; expected a word.")
    return word


def _apart(kind: Any, rest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Say which keys are the hook's own options, and which are those of its registration.

    What the class itself takes is its own, such as `every` of a probe, unless its options stand
    under `init_args`.
    """
    under = rest.pop("init_args", None)
    if under is not None and not isinstance(under, Mapping):
        raise ConfigError(f"'init_args' is {under!r}; expected a mapping.")
    options = {str(key): value for key, value in (under or {}).items()}
    own = () if options else options_of(kind)
    registration = {key: rest.pop(key) for key in _REGISTRATION if key in rest and key not in own}
    twice = [key for key in rest if key in options]
    if twice:
        raise ConfigError(f"'{twice[0]}' stands under 'init_args' and beside it. Keep one.")
    return options | rest, registration


def items_of(config: Any) -> Iterator[tuple[str, str | None, Any]]:
    """Each hook of a configuration: where it stands, the kind it has to be of, and itself."""
    where = "hooks"
    if isinstance(config, Mapping) and "hooks" in config:
        config = cast("Mapping[str, Any]", config)["hooks"]
    if config is None:
        return
    if isinstance(config, HooksConfig):
        config = [{"name": name, "init_args": given} for name, given in config.hooks()]
    if isinstance(config, Mapping):
        sections = cast("Mapping[str, Any]", config)
        _check_sections(sections)
        for section, kind in SECTIONS.items():  # in this order, however the mapping is written
            items = sections.get(section)
            for i, item in enumerate(_list(items, f"{where}.{section}")):
                yield f"{where}.{section}[{i}]", kind, item
    else:
        for i, item in enumerate(_list(config, where)):
            yield f"{where}[{i}]", None, item


def _check_sections(sections: Mapping[str, Any]) -> None:
    unknown = [str(name) for name in sections if name not in SECTIONS]
    if unknown:
        known = [*SECTIONS, "hooks"]
        raise ConfigError(
            f"'{unknown[0]}' is no section of hooks.{nearest(unknown[0], known)} "
            f"The sections are: {', '.join(SECTIONS)}."
        )


def _list(items: Any, where: str) -> list[Any]:
    if items is None:
        return []
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise ConfigError(f"'{where}' is {items!r}; expected a list of hooks.")
    return list(items)
