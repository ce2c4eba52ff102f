"""The items of a list of hooks: where each one is, what its keys mean, and its registration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from hookline.arguments import read_items, show_value
from hookline.config.hook_names import load_hook_class
from hookline.config.trainer_config import HooksConfig
from hookline.dispatch import Registration
from hookline.errors import ArgumentError, ConfigError, HooklineError, nearest
from hookline.hook import Hook
from hookline.masking import mask_text
from hookline.options import REGISTRATION_KEYS, BuiltIn, check_options, get_options, mask_declared

SECTIONS: Mapping[str, str] = {
    "loop": "loop",
    "forward": "forward",
    "update": "update",
    "probes": "probe",
}
"""The sections of a configuration of hooks, and the kind of hook in each."""


@dataclass(frozen=True)
class HookItem:
    """One hook of a configuration, with checked options."""

    name: str
    alias: str | None
    enabled: bool
    hook_class: type[Hook]
    options: Mapping[str, Any]
    """The options to create it with."""

    resolved: Mapping[str, Any]
    """The same options including defaults."""

    registration: Mapping[str, Any]
    """The arguments of `add_hook`: its schedule and its place."""

    @classmethod
    def read(
        cls, item: str | Mapping[str, Any], kind: str | None = None, *, check_values: bool = True
    ) -> HookItem:
        """Read an item of a configuration, load its class and check its options.

        Args:
            item: a hook's name, or a mapping with `name` or `class_path`.
            kind: the kind of hook that the item's section requires; None for any.
            check_values: whether to check the values of a built-in's options.
        """
        rest = {"name": item} if isinstance(item, str) else _as_options(item)
        name, alias = _pop_names(rest)
        enabled = rest.pop("enabled", True)
        if not isinstance(enabled, bool):
            raise ConfigError(f"'enabled' is {show_value(enabled)}; expected true or false.")
        hook_class = load_hook_class(name)
        own_kind = hook_class.hookline_kind
        if kind not in (None, own_kind):
            section = next(key for key, value in SECTIONS.items() if value == own_kind)
            raise ConfigError(f"'{name}' is of kind '{own_kind}'. Move it to '{section}'.")
        options, registration = _split_options(hook_class, rest)
        check_values = check_values and issubclass(hook_class, BuiltIn)
        resolved = check_options(hook_class, options, check_values=check_values)
        return cls(name, alias, enabled, hook_class, options, resolved, registration)

    def make_hook(self) -> Hook:
        """Return a new hook with these options."""
        hook_class: Any = self.hook_class
        try:
            hook: Hook = hook_class(**self.options)
        except HooklineError:
            raise
        except Exception as error:  # whatever the class's own code raises
            reason = mask_text(f"{type(error).__name__}: {error}")
            options = show_value(dict(self.options))
            raise ConfigError(
                f"'{self.name}' could not be created with {options} ({reason:.500})."
            ) from error
        hook.hookline_options = hook.hookline_options or mask_declared(hook_class, self.resolved)
        return hook

    def register(self) -> Registration:
        """Return the registration of a new hook with these options."""
        name = {} if self.alias is None else {"name": self.alias}
        options = {**name, "enabled": self.enabled, **self.registration}
        return Registration(self.make_hook(), options)


def make_registration(item: Any, kind: str | None = None) -> Registration:
    """Return an item of a list of hooks as the registration of a hook.

    An item is a hook, `every(…)`, a hook's name, or a mapping with `name` or `class_path`.
    """
    if isinstance(item, Registration):
        inner = make_registration(item.hook, kind)
        return Registration(inner.hook, {**inner.options, **item.options})
    if isinstance(item, str | Mapping):
        return HookItem.read(item, kind).register()
    return Registration(item, {} if kind is None else {"kind": kind})


def make_hook(name: str, options: Mapping[str, Any]) -> Hook:
    """Return a hook of this name or class path, created with these options."""
    return HookItem.read({"name": name, "init_args": options}).make_hook()


def _pop_names(rest: dict[str, Any]) -> tuple[str, str | None]:
    """Return the hook's name or class path, and its name in the run if one is given."""
    path, name, alias = (_pop_string(rest, key) for key in ("class_path", "name", "as"))
    if path is not None and name is not None:
        if alias is not None:
            raise ConfigError("'name' and 'as' both name the hook of a 'class_path'. Keep one.")
        return path, name
    found = path if path is not None else name
    if found is None:
        hint = nearest("name", rest)
        raise ConfigError(f"'name' is missing; expected a hook's name or class path.{hint}")
    return found, alias


def _pop_string(rest: dict[str, Any], key: str) -> str | None:
    value = rest.pop(key, None)
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigError(f"'{key}' is {show_value(value)}; expected a non-empty string.")
    return value


def _split_options(hook_class: Any, rest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the hook's own options, and the arguments of its registration."""
    init_args = rest.pop("init_args", None)
    if init_args is not None and not isinstance(init_args, Mapping):
        raise ConfigError(f"'init_args' is {show_value(init_args)}; expected a mapping.")
    options = {} if init_args is None else _as_options(init_args)
    own = set(() if options else get_options(hook_class))
    if _is_schedule(hook_class, rest.get("every")):
        own.discard("every")
    registration = {
        key: rest.pop(key) for key in REGISTRATION_KEYS if key in rest and key not in own
    }
    duplicates = [key for key in rest if key in options]
    if duplicates:
        raise ConfigError(f"'{duplicates[0]}' is given inside and beside 'init_args'. Keep one.")
    return options | rest, registration


def _is_schedule(hook_class: type[Hook], every: Any) -> bool:
    """Return whether `every` is for the registration, which the hook's own option follows."""
    is_number = type(every) is int and every > 0
    return is_number and issubclass(hook_class, BuiltIn) and hook_class.follows_registration()


def iterate_items(config: Any) -> Iterator[tuple[str, str | None, Any]]:
    """Yield each hook of a configuration: its place, the kind its section requires, the item."""
    for _ in range(2):  # the configuration, and its `hooks`
        if isinstance(config, Mapping):
            config = config.get("hooks", config)
    if config is None:
        return
    if isinstance(config, HooksConfig):
        config = [{"name": name, "init_args": options} for name, options in config.hooks()]
    if isinstance(config, Mapping):
        sections = cast("Mapping[str, Any]", config)
        for name in sections:
            if name not in SECTIONS:
                hint = nearest(name, [*SECTIONS, "hooks"]) if isinstance(name, str) else ""
                known = f"The sections are: {', '.join(SECTIONS)}."
                raise ConfigError(f"Unknown section {show_value(name)} of hooks.{hint} {known}")
        for section, kind in SECTIONS.items():  # in this order, whatever the mapping's order is
            for i, item in enumerate(_as_list(sections.get(section), f"hooks.{section}")):
                yield f"hooks.{section}[{i}]", kind, item
    else:
        for i, item in enumerate(_as_list(config, "hooks")):
            yield f"hooks[{i}]", None, item


def split_hooks(config: Any) -> tuple[Any, Any]:
    """Return a trainer's configuration without the hooks that are listed in it, and these hooks."""
    hooks = config.get("hooks") if isinstance(config, Mapping) else None
    if hooks is None or isinstance(hooks, HooksConfig):
        return config, None
    if not isinstance(hooks, Mapping):
        return {**config, "hooks": {}}, hooks
    fields: dict[Any, Any] = {}
    sections: dict[Any, Any] = {}
    for name, value in hooks.items():
        is_field = name in HooksConfig.model_fields or not nearest(show_value(name), SECTIONS)
        (fields if is_field and name not in SECTIONS else sections)[name] = value
    return {**config, "hooks": fields}, sections


def _as_list(items: Any, place: str) -> list[Any]:
    try:
        return [] if items is None else read_items(f"'{place}'", items, "a list of hooks")
    except ArgumentError as error:
        raise ConfigError(str(error)) from error


def _as_options(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    return {key if isinstance(key, str) else show_value(key): mapping[key] for key in mapping}
