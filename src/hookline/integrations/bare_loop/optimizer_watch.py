"""Steps of optimizers: torch's are watched by their own hooks, of others `step` is replaced.

An optimizer is any object with `param_groups`, `step` and `zero_grad`. One that `attach` was not
given is found when it steps parameters of the model. `StepRule` says when a step with several has
ended.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hookline.errors import ArgumentError, NotProvidedError
from hookline.loop.event_context import parameters_of
from hookline.loop.model_watch import keep_out_of_graphs
from hookline.loop.patches import WrappedMethods

log = logging.getLogger("hookline")

StepCallback = Callable[[Any, Any, Any], Any]
"""Called with the optimizer, its arguments with itself first, and keywords; see PyTorch's hooks."""

_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether this is an optimizer of torch, with hooks of its own."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def is_like_optimizer(value: Any) -> bool:
    """Return whether an object that is no optimizer of torch behaves like one."""
    groups = getattr(value, "param_groups", None)
    return (
        not isinstance(value, type)
        and isinstance(groups, list | tuple)
        and all(isinstance(group, dict) and "params" in group for group in groups)
        and all(callable(getattr(value, name, None)) for name in ("step", "zero_grad"))
    )


class AwaitedOptimizer:
    """Stands for the optimizer until it steps: it has the parameters, and nothing else."""

    def __init__(self, model: torch.nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.param_groups: list[dict[str, Any]] = [{"params": trained}]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotProvidedError(
            f"The optimizer's '{name}' is not known yet: attach was not given the optimizer, and "
            "waits until one steps the model's parameters. Give it: attach(model, optimizer, …)."
        )


class OptimizerWatch:
    """Calls back before and after each step of the optimizers that are watched.

    Attributes:
        searches: whether further optimizers are looked for.
    """

    def __init__(self, before: StepCallback, after: StepCallback) -> None:
        self._before, self._after = before, after
        self._handles: list[RemovableHandle] = []
        self._wrapped = WrappedMethods()
        self._search: weakref.finalize[..., Any] | None = None
        self.searches = False

    def watch(self, optimizer: Any) -> None:
        """Watch the steps of an optimizer."""
        if has_step_hooks(optimizer):
            before, after = (_for_outer_steps(optimizer, f) for f in (self._before, self._after))
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))
            return

        def step_with_hooks(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._step(optimizer, step, args, kwargs)

        try:
            self._wrapped.wrap(optimizer, "step", step_with_hooks)
        except TypeError as error:
            raise ArgumentError(
                f"{type(optimizer).__name__} has the methods of an optimizer, but its `step` "
                "cannot be replaced to see it (it has no `__dict__`). Call hooks in the loop "
                "instead: `hookline.HookRunner(hooks)`."
            ) from error

    def _step(self, optimizer: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Step an object that is no optimizer of torch."""
        args = (optimizer, *args)
        args, kwargs = self._before(optimizer, args, kwargs) or (args, kwargs)
        result = step(*args[1:], **kwargs)
        self._after(optimizer, args, kwargs)
        return result

    def search(self, look: Callable[[Any], Any]) -> None:
        """Call a method with every optimizer of torch that steps, until `end_search`."""
        method = weakref.WeakMethod(look)

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if (call := method()) is not None:
                call(optimizer)

        keep_out_of_graphs(before_step)
        handle = register_optimizer_step_pre_hook(before_step)
        self._search = weakref.finalize(self, handle.remove)
        self._search.atexit = False
        self.searches = True

    def end_search(self) -> None:
        """Look for no more optimizers; not before one steps, when PyTorch goes over its hooks."""
        if self._search is not None:
            self._search()
            self._search, self.searches = None, False

    def detach(self) -> None:
        """Remove all hooks, and put `step` back."""
        self.end_search()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._wrapped.restore()
        self._before = self._after = _do_nothing  # or a cycle would keep their owner


class StepRule:
    """Decides which optimizers have to step before a step has ended.

    All of them have to; or, as soon as one steps again before another one has, the step of that
    one ends each step from then on.

    Args:
        optimizers: the optimizers, as `attach` knows them; more may be appended.
        ends_with: the number of the optimizer whose step ends a step, where the user has said so.

    Attributes:
        ends_with: the number of the optimizer whose step ends a step; None if all of them have to.
        ends_with_batch: whether another library's trainer says when a step has ended.
        may_grow: whether optimizers that nobody has seen yet may step.
    """

    def __init__(self, optimizers: Sequence[Any], ends_with: int | None = None) -> None:
        self._optimizers = optimizers
        self.ends_with = ends_with
        self.ends_with_batch = self.may_grow = False

    def is_complete(self, stepped: Collection[int]) -> bool:
        """Return whether a step has ended in which these optimizers have stepped."""
        if self.ends_with is not None:
            return self.ends_with in stepped
        return len(stepped) == len(self._optimizers) and not self.may_grow

    def repeat(self, i: int, stepped: Collection[int]) -> bool:
        """Learn from an optimizer that steps again; return whether the step ended before that."""
        if self.ends_with_batch or self.ends_with is not None:
            return False
        if len(stepped) < len(self._optimizers):
            self.ends_with = i
            log.info(
                "Optimizer %d (%s) steps again before the others have stepped: from now on, its "
                "step ends a step. To say so at once: attach(…, step_of=optimizer).",
                *(i, type(self._optimizers[i]).__name__),
            )
        self.may_grow = False
        return True

    def load(self, ends_with: int | None) -> None:
        """Restore what a checkpoint has of the rule, unless the user has said otherwise."""
        if self.ends_with is None and ends_with is not None and ends_with < len(self._optimizers):
            self.ends_with = ends_with


def _do_nothing(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Do nothing before or after a step."""


def holds_any(optimizer: Any, parameters: set[int]) -> bool:
    """Return whether an optimizer has one of these parameters, given by id."""
    return any(id(parameter) in parameters for parameter in parameters_of(optimizer))


def hold_all(optimizers: Sequence[Any], model: torch.nn.Module) -> bool:
    """Return whether optimizers have all parameters of a model that are trained."""
    held = {id(parameter) for each in optimizers for parameter in parameters_of(each)}
    return all(id(p) in held for p in model.parameters() if p.requires_grad)


def _for_outer_steps(optimizer: Any, hook: StepCallback) -> StepCallback:
    """Return the step hook without its calls within a step of the same optimizer.

    An optimizer's `step` may call that of its base class. PyTorch calls its hooks for both, as soon
    as an optimizer of the base class was made in the same process. For a loop, this is one step.
    """
    classes = (each for each in type(optimizer).__mro__ if each is not torch.optim.Optimizer)
    if len({_unhooked(vars(each)["step"]) for each in classes if "step" in vars(each)}) < 2:
        return hook

    def call(optimizer: Any, args: Any, kwargs: Any) -> Any:
        return None if _is_nested(optimizer) else hook(optimizer, args, kwargs)

    keep_out_of_graphs(call)
    return call


def _unhooked(step: Any) -> Any:
    """Return a class's `step` as it was before PyTorch let it call hooks.

    That is done to the class of an optimizer that is made, also if it inherits its `step`, as AdamW
    does from Adam.
    """
    return step.__wrapped__ if getattr(step, "__code__", None) is _STEP else step


def _is_nested(optimizer: Any) -> bool:
    """Return whether two steps of this optimizer are on the stack.

    A count that a step adds to would be wrong after a step that has raised.
    """
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:  # a generator of frames would take twice as long, in each step
        count += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count > 1
