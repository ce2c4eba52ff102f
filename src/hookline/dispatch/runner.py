"""HookRunner: a HookManager for a loop that fires five events by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex, overload

from hookline.arguments import read_items
from hookline.context import StepContext
from hookline.dispatch.entry import Entry
from hookline.dispatch.manager import HookManager
from hookline.errors import NameTakenError, SignatureError
from hookline.hook import Hook, as_hook


class HookRunner(HookManager):
    """Calls hooks in the order of a list; with an empty list each call costs one branch.

        runner = HookRunner([MyHook()])
        runner.on_train_begin(config)
        for …:
            runner.on_step_end(StepContext(…))
        runner.on_train_end(step, tokens_seen)

    Args:
        hooks: the hooks; None for an empty list.
    """

    _by_group = False  # the order of the list

    def _make_entry(
        self,
        hook: Hook,
        name: str | None = None,
        replace: bool = False,
        taken: set[str] | None = None,
    ) -> Entry:
        entry = super()._make_entry(hook, name, replace, taken)
        if self.source is None or isinstance(self.source, _Config):
            for event, binding in entry.bindings.items():
                provided = _PROVIDED.get(event, binding.required)
                for argument in sorted(binding.required - provided):
                    raise SignatureError(
                        f"{binding.label} asks for '{argument}', which a HookRunner does not "
                        f"provide. In {event} it has: {', '.join(sorted(provided))}. Give the "
                        "parameter a default, or create the runner with `source=`, an object that "
                        "has it as an attribute."
                    )
        return entry

    @property
    def hooks(self) -> HookList:
        """The hooks as a list: appending registers a hook, deleting removes it."""
        return HookList(self)

    @hooks.setter
    def hooks(self, hooks: Iterable[Hook]) -> None:
        self.set_hooks(hooks)

    def set_hooks(self, hooks: Iterable[Hook]) -> None:
        """Replace the hooks by these; hooks that stay keep their name, schedule and stats."""
        with self._lock:
            hooks = read_items("hooks", hooks, "a list of hooks")
            if len({id(hook) for hook in hooks}) < len(hooks):
                raise NameTakenError("A hook is in the list twice. Create another instance of it.")
            registered = {id(entry.hook): entry for entry in self._entries}
            taken = {registered[id(hook)].name for hook in hooks if id(hook) in registered}
            entries: list[Entry] = []
            for hook in hooks:
                entry = registered.get(id(hook))
                if entry is None:
                    entry = self._make_entry(as_hook(hook), taken=taken)
                    taken.add(entry.name)
                entries.append(entry)
            self._apply(entries, changed={*entries, *self._entries})
            for entry in entries:
                entry.before = entry.after = None  # the list alone determines the order

    def on_train_begin(self, config: Any) -> None:
        """Fire `on_train_start`. Hooks may ask for `config` in every later event too."""
        self.run_started()
        if self.source is None or isinstance(self.source, _Config):
            self.source = _Config(config)
        if self.dispatchers.on_train_start is not None:
            self.fire("on_train_start", config=config)

    def on_step_end(self, ctx: StepContext) -> None:
        """Fire `on_step_end`. Hooks may ask for `ctx`, or for its fields by name."""
        if self.dispatchers.on_step_end is not None:
            self.fire("on_step_end", ctx=ctx)

    def on_eval_end(self, metrics: Mapping[str, float], step: int) -> None:
        """Fire `on_validation_end`."""
        if self.dispatchers.on_validation_end is not None:
            self.fire("on_validation_end", metrics=metrics, step=step)

    def on_checkpoint_save(self, step: int, path: str) -> None:
        """Fire `on_checkpoint_save`."""
        if self.dispatchers.on_checkpoint_save is not None:
            self.fire("on_checkpoint_save", step=step, path=path)

    def on_train_end(self, step: int, tokens_seen: int) -> None:
        """Fire `on_train_end`."""
        if self.dispatchers.on_train_end is not None:
            self.fire("on_train_end", step=step, tokens_seen=tokens_seen)
        self.run_ended()


_PROVIDED = {
    "on_train_start": {"config"},
    "on_step_end": {"config", "ctx", *(field.name for field in fields(StepContext))},
    "on_validation_end": {"config", "metrics", "step"},
    "on_checkpoint_save": {"config", "checkpoint_path", "step"},
    "on_train_end": {"config", "step", "tokens_seen"},
}


@dataclass
class _Config:
    """The source of a runner that was given none: the configuration from `on_train_begin`."""

    config: Any


class HookList(MutableSequence[Hook]):
    """The hooks of a runner as a list; changing it registers and removes them."""

    def __init__(self, runner: HookRunner) -> None:
        self._runner = runner

    def _hooks(self) -> list[Hook]:
        return [self._runner.get_hook(name) for name in self._runner.list_hooks()]

    def __len__(self) -> int:
        return len(self._runner)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Hook: ...
    @overload
    def __getitem__(self, index: slice) -> list[Hook]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Hook | list[Hook]:
        return self._hooks()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        hooks = self._hooks()
        hooks[index] = value
        self._runner.set_hooks(hooks)

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        hooks = self._hooks()
        del hooks[index]
        self._runner.set_hooks(hooks)

    def insert(self, index: SupportsIndex, value: Hook) -> None:
        """Register a hook at this index."""
        hooks = self._hooks()
        hooks.insert(index, value)
        self._runner.set_hooks(hooks)

    def reverse(self) -> None:
        """Reverse the order."""
        self._runner.set_hooks(self._hooks()[::-1])

    def __eq__(self, other: object) -> bool:
        return self._hooks() == (other._hooks() if isinstance(other, HookList) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._hooks())
