"""HookRegistry: a HookManager that creates its hooks from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hookline.arguments import check_mapping, show_value
from hookline.config.hook_items import SECTIONS, iterate_items, make_registration
from hookline.config.trainer_config import HooksConfig
from hookline.dispatch import HookLike, HookManager, HookSettings, Registration
from hookline.dispatch.entry import Entry
from hookline.dispatch.event_arguments import EventArguments
from hookline.errors import ConfigError, HooklineError, UnknownHookError, nearest
from hookline.events import FLOWS
from hookline.hook import Hook
from hookline.updates.gradient_mapping import StandaloneGradients


class HookRegistry(HookManager):
    """The hooks of one run, as a configuration names them.

        registry = HookRegistry(
            {
                "hooks": {
                    "forward": [{"name": "activation_stats", "log_interval": 10}],
                    "update": [{"name": "clip_norm", "max_norm": 1.0, "enabled": False}],
                }
            }
        )

    The sections are `loop`, `forward`, `update` and `probes`. A hook is a name, or a mapping with
    `name`: a built-in, a hook of an installed package, a class path, or a short class name. `as` is
    its name in the run; `enabled: false` registers it disabled; `every`, `sample_rate`,
    `from_epoch`, `before`, `after` and `strict` are arguments of `add_hook`, unless the class has
    an option of that name. All other keys are options of the hook, which may also be given under
    `init_args`. All hooks are registered, or none; the error then names every mistake.

    Args:
        config: a mapping with `hooks`, or its value: a mapping of sections, a list of hooks of any
            kind, or a `HooksConfig`; None for no hooks.
        hooks: further hooks, or a manager that has them; registered first.
        source: an object with the arguments of events as attributes.
        settings: how failing and costly hooks are treated; by default those of a `HooksConfig`.
        on_change: called after hooks were added, removed, enabled or disabled.
    """

    _default: Hook | None = None  # replaced by another hook of its class

    def __init__(
        self,
        config: HooksConfig | Mapping[str, Any] | Iterable[Any] | None = None,
        *,
        hooks: Iterable[HookLike] | HookManager | None = None,
        source: object | None = None,
        settings: HookSettings | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        if settings is None and isinstance(config, HooksConfig):
            settings = config.manager_settings()
        super().__init__(hooks, source=source, settings=settings, on_change=on_change)
        self.add_configured(config)

    def add_configured(
        self, config: HooksConfig | Mapping[str, Any] | Iterable[Any] | None
    ) -> list[str]:
        """Register all hooks of a configuration, or none; return their names."""
        names: list[str] = []
        problems: list[str] = []
        gone = dict(self._removed)
        for place, kind, item in list(iterate_items(config)):  # a malformed list raises first
            try:
                new = make_registration(item, kind)
                names.append(self.add_hook(new.hook, **new.options))
            except (HooklineError, ValueError) as error:  # an invalid schedule is a ValueError
                problems.append(f"{place}: {error}")
        if problems:
            for name in names:
                self.remove_hook(name)
            self._removed = gone  # hooks that failed to register were never removed
            raise ConfigError(*problems)
        return names

    def _read_item(self, item: Any) -> Registration:
        return make_registration(item)

    def add_default(self, hook: Hook) -> None:
        """Register a hook after all others, until another hook of its class is registered."""
        if not any(type(entry.hook) is type(hook) for entry in self._entries):
            self._default = hook
            self.add_hook(hook)

    def _make_entry(
        self,
        hook: Hook,
        name: str | None = None,
        replace: bool = False,
        taken: set[str] | None = None,
    ) -> Entry:
        default = self._default
        if default is not None and hook is not default and type(hook) is type(default):
            self._default = None
            for known in [entry.name for entry in self._entries if entry.hook is default]:
                self.remove_hook(known)
        entry = super()._make_entry(hook, name, replace, taken)
        entry.is_default = hook is self._default
        return entry

    # -- toggles ----------------------------------------------------------------------------------

    def enable_hook(self, name: str, index: int | None = None) -> None:
        """Enable a hook from the next event on, also after it was disabled by failures.

        With an index, `name` is a kind of hook, and the index is that of `name_at`.
        """
        super().enable_hook(name if index is None else self.name_at(name, index))

    def disable_hook(self, name: str, index: int | None = None) -> None:
        """Disable a hook. It stays registered, keeps its place and its state, and costs nothing.

        With an index, `name` is a kind of hook, and the index is that of `name_at`.
        """
        super().disable_hook(name if index is None else self.name_at(name, index))

    def name_at(self, kind: str, index: int) -> str:
        """Return the name of a hook by its kind and its index among this kind's hooks.

        The kinds are "loop", "forward", "update" and "probe"; disabled hooks count, too.
        """
        names = [name for name, _, _ in self.of_kind(_kind(kind))]
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(names):
            valid = ", ".join(f"{i} is '{name}'" for i, name in enumerate(names)) or "there is none"
            raise UnknownHookError(
                f"There is no hook {show_value(index)} of kind '{kind}': {valid}."
            )
        return names[index]

    def get_active_hooks(self, kind: str | None = None) -> list[str]:
        """Return the names of active hooks in calling order, of one kind or of all.

        `describe()` also lists the others, with their status.
        """
        wanted = None if kind is None else _kind(kind)
        return [
            entry.name
            for entry in self._entries
            if entry.enabled and wanted in (None, entry.hook.hookline_kind)
        ]

    # -- direct calls -----------------------------------------------------------------------------

    def call_forward_hooks(self, activations: Any, **given: Any) -> None:
        """Call the active forward hooks in order, with detached activations.

        A hook that changes them, or advances a random number generator, raises an `ObserverError`.

        Args:
            activations: the model's output: a tensor, or tensors in tuples, lists or mappings.
            given: further arguments for hooks, such as `step=` or `trainer=`.
        """
        from hookline.tensors.observation import Observation

        if self.dispatchers.forward is not None:
            seen = Observation(activations, "the activations")
            given = {**given, "observation": seen, "activations": seen.activations}
            self.dispatchers.forward(EventArguments(self, FLOWS["forward"], given))

    def call_update_hooks(self, gradients: Mapping[str, Any], **given: Any) -> dict[str, Any]:
        """Apply the active updates to gradients in order; return the transformed gradients.

        The mapping itself is not changed, but most updates change its tensors in place. Pass clones
        to keep the originals.

        Args:
            gradients: gradients by parameter name; None for a parameter without gradient.
            given: further arguments for updates, such as `model=` or `step=`.
        """
        gradients = check_mapping("call_update_hooks(gradients)", gradients)
        if self.dispatchers.update is None:
            return gradients
        changed = StandaloneGradients(gradients)
        given = {"optimizer_idx": 0, **given, "gradients": changed}
        self.dispatchers.update(EventArguments(self, FLOWS["update"], given))
        return {**gradients, **changed}


def _kind(name: str) -> str:
    """Return the kind of hook for a kind or a section name."""
    kinds = {**SECTIONS, **{kind: kind for kind in SECTIONS.values()}}
    if not isinstance(name, str) or name not in kinds:
        hint = nearest(name, kinds) if isinstance(name, str) else ""
        raise UnknownHookError(
            f"Unknown kind {show_value(name)}.{hint} The kinds are: {', '.join(SECTIONS.values())}."
        )
    return kinds[name]
