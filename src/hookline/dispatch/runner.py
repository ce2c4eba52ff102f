"""HookRunner: a HookManager for a loop that fires five events by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hookline.context import StepContext
from hookline.dispatch.entry import Entry
from hookline.dispatch.manager import HookManager
from hookline.errors import SignatureError
from hookline.hook import Hook


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

    def _make_entry(self, hook: Hook, name: str | None = None, replace: bool = False) -> Entry:
        entry = super()._make_entry(hook, name, replace)
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
    def hooks(self) -> tuple[Hook, ...]:
        """The hooks in their order; `add_hook` adds one."""
        return tuple(entry.hook for entry in self._entries)

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
    """The source of a runner without one of its own: the configuration from `on_train_begin`."""

    config: Any
