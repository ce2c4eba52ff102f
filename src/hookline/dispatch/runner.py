"""HookRunner: a HookManager for a loop that calls its hooks by hand, in five places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex, overload

from hookline.context import StepContext
from hookline.dispatch.binding import Binding
from hookline.dispatch.entry import Entry
from hookline.dispatch.manager import HookManager
from hookline.errors import NameTakenError, SignatureError
from hookline.hook import Hook

__all__ = ["HookRunner"]


class HookRunner(HookManager):
    """Calls hooks in the order of the list; with an empty list each call costs one branch.

        runner = HookRunner([MyHook()])
        runner.on_train_begin(config)
        for …:
            runner.on_step_end(StepContext(…))
        runner.on_train_end(step, tokens_seen)

    Args:
        hooks: the hooks; None is an empty list.
    """

    _by_rank = False  # the list's order is the order

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
                _refuse_what_is_not_given(event, binding)
        return entry

    @property
    def hooks(self) -> HookList:
        """The hooks as a list: what is appended is registered, what is deleted is removed."""
        return HookList(self)

    @hooks.setter
    def hooks(self, hooks: Iterable[Hook]) -> None:
        self.become(hooks)

    def become(self, hooks: Iterable[Hook]) -> None:
        """Make these the hooks, in this order; who stays keeps its name, schedule and account."""
        with self._lock:
            wanted = list(hooks)
            if len({id(hook) for hook in wanted}) < len(wanted):
                raise NameTakenError("A hook is in the list twice. Make another instance of it.")
            here = {id(entry.hook): entry for entry in self._order}
            taken = {here[id(hook)].name for hook in wanted if id(hook) in here}
            order: list[Entry] = []
            for hook in wanted:
                entry = here.get(id(hook))
                if entry is None:
                    entry = self._make_entry(hook, taken=taken)
                    taken.add(entry.name)
                order.append(entry)
            self._take(order, changed={*order, *self._order})
            for entry in order:
                entry.before = entry.after = None  # the list's order is the only wish

    def on_train_begin(self, config: Any) -> None:
        """Training begins. Hooks may ask for `config` in every later event too."""
        self.run_started()
        if self.source is None or isinstance(self.source, _Config):
            self.source = _Config(config)
        if self.dispatchers.on_train_start is not None:
            self.fire("on_train_start", config=config)

    def on_step_end(self, ctx: StepContext) -> None:
        """A step is done. Hooks may ask for `ctx`, or for its fields by name."""
        if self.dispatchers.on_step_end is not None:
            self.fire("on_step_end", ctx=ctx)

    def on_eval_end(self, metrics: Mapping[str, float], step: int) -> None:
        """Evaluation is done."""
        if self.dispatchers.on_validation_end is not None:
            self.fire("on_validation_end", metrics=metrics, step=step)

    def on_checkpoint_save(self, step: int, path: str) -> None:
        """A checkpoint was written."""
        if self.dispatchers.on_checkpoint_save is not None:
            self.fire("on_checkpoint_save", step=step, path=path)

    def on_train_end(self, step: int, tokens_seen: int) -> None:
        """The loop is over."""
        if self.dispatchers.on_train_end is not None:
            self.fire("on_train_end", step=step, tokens_seen=tokens_seen)
        self.run_ended()


_GIVEN = {
    "on_train_start": {"config"},
    "on_step_end": {"config", "ctx", *(field.name for field in fields(StepContext))},
    "on_validation_end": {"config", "metrics", "step"},
    "on_checkpoint_save": {"config", "checkpoint_path", "step"},
    "on_train_end": {"config", "step", "tokens_seen"},
}


def _refuse_what_is_not_given(event: str, binding: Binding) -> None:
    """Refuse at registration what an entry point of a runner will not have at the end of a run."""
    given = _GIVEN.get(event, binding.asks)
    for argument in sorted(binding.asks - given):
        raise SignatureError(
            f"{binding.label} asks for '{argument}', which a HookRunner is not given. In {event} "
            f"it has: {', '.join(sorted(given))}. Give the parameter a default, or make the runner "
            "with `source=`, an object that has it as an attribute."
        )


@dataclass
class _Config:
    """What a runner knows by itself: the configuration it was told at the beginning."""

    config: Any


class HookList(MutableSequence[Hook]):
    """The hooks of a runner as a list: changing it registers and removes them."""

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
        self._runner.become(hooks)

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        hooks = self._hooks()
        del hooks[index]
        self._runner.become(hooks)

    def insert(self, index: SupportsIndex, value: Hook) -> None:
        """Register a hook at this place."""
        hooks = self._hooks()
        hooks.insert(index, value)
        self._runner.become(hooks)

    def reverse(self) -> None:
        """Turn the order around."""
        self._runner.become(self._hooks()[::-1])

    def __eq__(self, other: object) -> bool:
        return self._hooks() == (other._hooks() if isinstance(other, HookList) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._hooks())
