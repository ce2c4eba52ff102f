"""HookRegistry: a HookManager that creates its hooks from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hookline.arguments import check_mapping
from hookline.config.hook_items import iterate_items, make_registration
from hookline.config.trainer_config import HooksConfig
from hookline.dispatch import HookLike, HookManager, HookSettings, Registration
from hookline.dispatch.entry import Entry
from hookline.dispatch.event_arguments import EventArguments
from hookline.errors import ConfigError, HooklineError
from hookline.events import FLOWS
from hookline.hook import Hook
from hookline.updates.gradients import StandaloneGradients


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
    `name`: a built-in, or a class path. `as` is its name in the
    run; `enabled: false` registers it disabled; `every`, `sample_rate`, `from_epoch`, `before`,
    `after` and `strict` are arguments of `add_hook`, unless the class has an option of that name.
    All other keys are options of the hook, which may also be given under `init_args`. All hooks are
    registered, or none; the error then names every mistake.

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

    def _make_entry(self, hook: Hook, name: str | None = None, replace: bool = False) -> Entry:
        default = self._default
        if default is not None and hook is not default and type(hook) is type(default):
            self._default = None
            for known in [entry.name for entry in self._entries if entry.hook is default]:
                self.remove_hook(known)
        entry = super()._make_entry(hook, name, replace)
        entry.is_default = hook is self._default
        return entry

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
