"""HookRunner: a HookManager for a loop that calls its hooks by hand, in five places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from hookline.dispatch.manager import HookManager
from hookline.hook import Hook

if TYPE_CHECKING:
    from hookline.context import StepContext

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

    @property
    def hooks(self) -> HookList:
        """The hooks as a list: what is appended is registered, what is deleted is removed."""
        return HookList(self)

    @hooks.setter
    def hooks(self, hooks: Iterable[Hook]) -> None:
        HookList(self)[:] = hooks

    def on_train_begin(self, config: Any) -> None:
        """Training begins. Hooks may ask for `config` in every later event too."""
        self.run_started()
        if self.source is None:
            self.source = SimpleNamespace(config=config)
        if self.live.on_train_start is not None:
            self.fire("on_train_start", config=config)

    def on_step_end(self, ctx: StepContext) -> None:
        """A step is done. Hooks may ask for `ctx`, or for its fields by name."""
        if self.live.on_step_end is not None:
            self.fire("on_step_end", ctx=ctx)

    def on_eval_end(self, metrics: Mapping[str, float], step: int) -> None:
        """Evaluation is done."""
        if self.live.on_validation_end is not None:
            self.fire("on_validation_end", metrics=metrics, step=step)

    def on_checkpoint_save(self, step: int, path: str) -> None:
        """A checkpoint was written."""
        if self.live.on_checkpoint_save is not None:
            self.fire("on_checkpoint_save", step=step, path=path)

    def on_train_end(self, step: int, tokens_seen: int) -> None:
        """The loop is over."""
        if self.live.on_train_end is not None:
            self.fire("on_train_end", step=step, tokens_seen=tokens_seen)
        self.run_ended()


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
        start = range(len(self))[index]
        if isinstance(start, range):
            new = list(value)
            del self[index]
            for i, hook in enumerate(new, start.start):
                self.insert(i, hook)
        else:
            self.insert(start, value)  # first, so that nothing is lost when it is refused
            del self[start + 1]

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        names = self._runner.list_hooks()
        for name in names[index] if isinstance(index, slice) else [names[index]]:
            self._runner.remove_hook(name)

    def insert(self, index: SupportsIndex, value: Hook) -> None:
        """Register a hook before the one that is at this place now."""
        following = self._runner.list_hooks()[index:]
        self._runner.add_hook(value, before=following[0] if following else None)

    def __eq__(self, other: object) -> bool:
        return self._hooks() == (other._hooks() if isinstance(other, HookList) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._hooks())
