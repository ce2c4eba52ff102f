"""HookRegistry: a HookManager that is built from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hookline.config.entry_points import packaged_hooks
from hookline.config.hook_items import SECTIONS, Item, items_of
from hookline.config.hook_names import BUILT_INS, PROBES, make_from
from hookline.config.trainer_config import HooksConfig
from hookline.dispatch import HookManager, HookSettings
from hookline.dispatch.arguments import EventArguments
from hookline.errors import ConfigError, HooklineError, UnknownHookError, nearest
from hookline.events import FLOWS
from hookline.hook import Hook
from hookline.updates.gradient_mapping import StandaloneGradients

__all__ = ["HookRegistry"]


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
    `name`: a built-in's, a class path, the short name of a class, or what an installed package
    brings. `as` is its name in the run; `enabled: false` registers it switched off; `every`,
    `sample_rate`, `from_epoch`, `before`, `after` and `strict` are those of `add_hook`, unless its
    class has an option of that name; all other keys are its options, which may also stand under
    `init_args`. Everything is made, and every mistake reported, at once.

    Args:
        config: a mapping with `hooks`, or what stands under it: a mapping of sections, a list of
            hooks of any kind, or a `HooksConfig`; None for no hooks.
        hooks: further hooks, which come first.
        source: has the arguments of events as attributes.
        settings: how to treat failures and cost; by default as a `HooksConfig` says.
        on_change: called after hooks came, went or were toggled.
    """

    def __init__(
        self,
        config: HooksConfig | Mapping[str, Any] | Iterable[Any] | None = None,
        *,
        hooks: Iterable[Hook] | None = None,
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
        """Register the hooks of a configuration, or none of them; return their names.

        Args:
            config: as for the registry itself.

        Raises:
            ConfigError: names each hook that is wrong, where it stands, and what would be right.
        """
        names: list[str] = []
        problems: list[str] = []
        gone = dict(self._removed)
        for place, kind, item in list(items_of(config)):  # what is no list is said first
            try:
                names.append(self._add_item(Item.read(item), kind))
            except (HooklineError, ValueError) as error:  # a schedule's is a ValueError
                problems.append(f"{place}: {error}")
        if problems:
            for name in names:
                self.remove_hook(name)
            self._removed = gone  # those were never there
            raise ConfigError("\n".join(problems))
        return names

    def _add_item(self, item: Item, kind: str | None) -> str:
        its = item.kind.hookline_kind
        if kind is not None and its != kind:
            section = next(name for name, of in SECTIONS.items() if of == its)
            raise ConfigError(f"'{item.name}' is of kind '{its}'. Move it to '{section}'.")
        hook = make_from(item.kind, item.name, item.options)
        name = item.alias if item.alias is not None else self._packaged_name(item.name)
        return self.add_hook(hook, name, enabled=item.enabled, **item.registration)

    def _packaged_name(self, name: str) -> str | None:
        """The name in a run of a package's hook is that of its entry point; others have theirs."""
        if name in BUILT_INS or name in PROBES:
            return None
        for one in packaged_hooks():
            if name in (one.name, one.full_name):
                taken = [one.name, *(f"{one.name}_{i}" for i in range(2, len(self) + 3))]
                return next(free for free in taken if free not in self)
        return None

    # -- toggles ----------------------------------------------------------------------------------

    def enable_hook(self, name: str, index: int | None = None) -> None:
        """Switch a hook on, from the next event on; also one that was disabled after failures.

        Args:
            name: its name; with an index, its kind: "loop", "forward", "update" or "probe".
            index: the hook's number among those of its kind, from 0, disabled ones included.
        """
        super().enable_hook(name if index is None else self.name_at(name, index))

    def disable_hook(self, name: str, index: int | None = None) -> None:
        """Switch a hook off. It stays registered, keeps its place and its state, costs nothing.

        Args:
            name: its name; with an index, its kind: "loop", "forward", "update" or "probe".
            index: the hook's number among those of its kind, from 0, disabled ones included.
        """
        super().disable_hook(name if index is None else self.name_at(name, index))

    def name_at(self, kind: str, index: int) -> str:
        """Return the name of a hook, by its kind and its number among those of this kind."""
        names = [name for name, _, _ in self.of_kind(_kind(kind))]
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(names):
            there = ", ".join(f"{i} is '{name}'" for i, name in enumerate(names)) or "there is none"
            raise UnknownHookError(f"There is no hook {index!r} of kind '{kind}': {there}.")
        return names[index]

    def get_active_hooks(self, kind: str | None = None) -> list[str]:
        """Return the names of the hooks that are called, in order; of one kind, or of all.

        `describe()` has the others too, with their status.
        """
        kinds = None if kind is None else _kind(kind)
        return [
            entry.name
            for entry in self._entries
            if entry.enabled and kinds in (None, entry.hook.hookline_kind)
        ]

    # -- by hand ----------------------------------------------------------------------------------

    def call_forward_hooks(self, activations: Any, **given: Any) -> None:
        """Show activations to the forward hooks that are enabled, in order.

        They get them detached. One that changes them, or draws random numbers, is a fatal error.

        Args:
            activations: what the model returned: a tensor, or tensors in tuples, mappings …
            given: what hooks may ask for besides, such as `step=` or `trainer=`.
        """
        from hookline.tensors.observation import Observation

        if self.dispatchers.forward is not None:
            seen = Observation(activations, "the activations")
            given = {**given, "observation": seen, "activations": seen.activations}
            self.dispatchers.forward(EventArguments(self, FLOWS["forward"], given))

    def call_update_hooks(self, gradients: Mapping[str, Any], **given: Any) -> dict[str, Any]:
        """Let the updates that are enabled transform gradients, in order; return what they became.

        The mapping itself stays as it is. An update may change the tensors in it in place, as most
        do: to keep what they were, pass clones.

        Args:
            gradients: gradients by the names of their parameters; None where there is none.
            given: what updates may ask for besides, such as `model=` or `step=`.
        """
        if self.dispatchers.update is None:
            return dict(gradients)
        changed = StandaloneGradients(gradients)
        given = {"optimizer_idx": 0, **given, "gradients": changed}
        self.dispatchers.update(EventArguments(self, FLOWS["update"], given))
        return {**gradients, **changed}


def _kind(name: str) -> str:
    """A kind, also by the name of its section."""
    kinds = {**SECTIONS, **{kind: kind for kind in SECTIONS.values()}}
    if name not in kinds:
        raise UnknownHookError(
            f"There is no kind '{name}'.{nearest(str(name), kinds)} "
            f"The kinds are: {', '.join(SECTIONS.values())}."
        )
    return kinds[name]
