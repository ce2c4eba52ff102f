"""Hook: the base class of hooks.

The parameters that a method declares are the arguments it gets. Toggles, schedules, order and cost
belong to the registration, so a hook has no attributes that could collide with a user's own, and
`super().__init__()` is never needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Set
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

from hookline.arguments import show_value
from hookline.errors import NotAHookError

Ranks = Literal["all", "main", "local_main"]


class HookGroup(IntEnum):
    """The order of hooks that are registered without `before=` or `after=`.

    Monitors come before control, and both before what saves and writes, so that what is saved and
    written is complete.
    """

    USER = 0
    MONITOR = 1
    CONTROL = 2
    CHECKPOINT = 3
    WRITER = 4
    DEFAULT = 5  # hooks that every trainer has


class Hook:
    """Base class of hooks. Subclass it and define the `on_…` methods you need.

    Each method declares the arguments it needs, by name, in any order:

        class Watch(hookline.Hook):
            def on_step_end(self, step, loss):
                print(step, loss)

    The arguments of each event are listed in its method's docstring, and on the events page. A
    misspelled event or parameter raises an error when the hook is registered.

    Args:
        name: the hook's name in a run; by default the class name in snake_case.
    """

    critical: ClassVar[bool] = False
    """Whether training stops when this hook fails."""

    intervenes: ClassVar[bool] = False
    """Whether this hook changes training; by default hooks only observe."""

    ranks: ClassVar[Ranks] = "all"
    """In which processes of a run this hook is called: "all", "main" (rank 0), or "local_main" (the
    first process of each node)."""

    secret_options: ClassVar[Set[str]] = frozenset()
    """The names of options whose values are secret; they are masked in records, logs and errors."""

    hookline_kind: ClassVar[str] = "loop"
    hookline_function: Callable[..., Any] | None = None
    hookline_group: ClassVar[HookGroup] = HookGroup.USER
    hookline_name: str | None = None
    hookline_options: Mapping[str, Any] = MappingProxyType({})
    """The options the hook was created with, if known; recorded in the manifest."""

    hookline_no_op: ClassVar[bool] = False
    """Whether a forward hook or update does nothing, so that its input need not be prepared."""

    hookline_optional_events: ClassVar[frozenset[str]] = frozenset()
    """Events that the hook does not require; a loop need not provide them."""

    hookline_records: ClassVar[bool] = False
    """Whether the hook exists to log values to the run; a bare loop then writes one by default."""

    hookline_cost: ClassVar[str] = ""
    """The hook's cost in one sentence, for `describe()`."""

    def __init__(self, name: str | None = None) -> None:
        torch = sys.modules.get("torch")  # not imported: there are no modules
        if torch is not None and isinstance(self, torch.nn.Module) and "_modules" not in vars(self):
            torch.nn.Module.__init__(self)
        if name is not None:
            self.hookline_name = name

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state to save in checkpoints; by default nothing is saved.

        A hook that is also a `torch.nn.Module` has the module's state.
        """
        inherited = getattr(super(), "state_dict", None)
        return {} if inherited is None else cast("dict[str, Any]", inherited(*args, **kwargs))

    def load_state_dict(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Restore a state that `state_dict` returned."""
        inherited = getattr(super(), "load_state_dict", None)
        return None if inherited is None else inherited(state, *args, **kwargs)

    def hookline_follow(self, every: int) -> bool:
        """Take `every` of the registration as an option of its own; False without one."""
        return False

    # -- events: generated from events.py by `make generate`; edit there --------------------------

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        """Training begins."""

    on_train_begin = on_train_start

    def on_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        """An epoch begins. Its own arguments: `epoch`."""

    on_epoch_begin = on_epoch_start

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """A training batch was loaded.

        Its own arguments: `batch`, `batch_idx`, `dataloader_idx` (`loader_idx`), `dataloader_name`
        (`loader_name`).
        """

    on_batch_start = on_train_batch_start
    on_batch_begin = on_train_batch_start

    def on_before_forward(self, *args: Any, **kwargs: Any) -> None:
        """The model is about to be called. Its own arguments: `batch`."""

    def on_after_forward(self, *args: Any, **kwargs: Any) -> None:
        """The model's outermost call has returned. Its own arguments: `outputs`."""

    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        """The loss is computed; backward is about to run. Its own arguments: `loss`."""

    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        """Backward has run."""

    def on_gradients_ready(self, *args: Any, **kwargs: Any) -> None:
        """Gradients are accumulated and unscaled, before updates and clipping.

        Its own arguments: `optimizer_idx`.
        """

    def on_gradient_clip(self, *args: Any, **kwargs: Any) -> None:
        """Gradients were clipped. Its own arguments: `grad_norm`, `optimizer_idx`."""

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer is about to step with the current gradients.

        Its own arguments: `optimizer_idx`.
        """

    on_pre_optimizer_step = on_before_optimizer_step

    def on_after_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer has stepped. Its own arguments: `optimizer_idx`."""

    def on_step_skipped(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer did not step. Its own arguments: `reason`, `optimizer_idx`."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A training batch is done.

        Its own arguments: `batch`, `batch_idx`, `dataloader_idx` (`loader_idx`), `dataloader_name`
        (`loader_name`), `metrics`, `loss`.
        """

    on_batch_end = on_train_batch_end

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """A step is done, completed or skipped; gradients are not zeroed yet.

        Its own arguments: `ctx`, `loss`, `grad_norm`, `lr`.
        """

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        """Validation begins. Its own arguments: `epoch`."""

    on_eval_start = on_validation_start
    on_eval_begin = on_validation_start

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """A validation batch was loaded.

        Its own arguments: `batch`, `batch_idx`, `dataloader_idx` (`loader_idx`), `dataloader_name`
        (`loader_name`).
        """

    on_eval_batch_start = on_validation_batch_start

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A validation batch is done.

        Its own arguments: `batch`, `batch_idx`, `dataloader_idx` (`loader_idx`), `dataloader_name`
        (`loader_name`), `metrics`, `loss`.
        """

    on_eval_batch_end = on_validation_batch_end

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        """Validation is done. Its own arguments: `epoch`, `metrics`."""

    on_eval_end = on_validation_end

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """An epoch is done. Its own arguments: `epoch`, `metrics`."""

    def on_checkpoint_save(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint is durable and complete.

        Its own arguments: `checkpoint_path` (`path`), `step`.
        """

    def on_checkpoint_load(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint was restored completely.

        Its own arguments: `checkpoint_path` (`path`), `step`.
        """

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """Training failed; the exception is re-raised after all hooks were called.

        Its own arguments: `exception`.
        """

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Training has ended, also after an exception or a stop."""

    on_training_end = on_train_end

    # -- end of events ----------------------------------------------------------------------------


class ForwardHook(Hook):
    """Observes the model's outputs, for every batch, before the loss is computed.

        class Scale(hookline.ForwardHook):
            def __call__(self, activations):
                print(activations.abs().mean())

    `__call__` may also ask, by name, for the arguments that all events have, such as `step` or
    `trainer`. The activations are detached. Changing them in place, or consuming random numbers of
    training, is a fatal error that names the hook.
    """

    hookline_kind = "forward"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Observe `activations`."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__(self, activations).")


class UpdateHook(Hook):
    """Transforms gradients, between backward and optimizer step.

        class Half(hookline.UpdateHook):
            def __call__(self, gradients):
                return {name: gradient / 2 for name, gradient in gradients.items()}

    `gradients` maps parameter names to gradients, accumulated and unscaled, before clipping. The
    hook is called for each optimizer that is due. The returned gradients replace those of the same
    name; returning None changes nothing. `__call__` may also ask, by name, for `optimizer_idx` and
    for the arguments that all events have. When it fails, training stops.
    """

    hookline_kind = "update"
    critical = True
    intervenes = True

    def __call__(self, *args: Any, **kwargs: Any) -> Mapping[str, Any] | None:
        """Return the gradients that replace `gradients`."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__(self, gradients).")


class _FunctionHook(Hook):
    def __init__(self, function: Callable[..., Any]) -> None:
        self.hookline_function = function


class _ForwardFunction(_FunctionHook, ForwardHook):
    pass


class _UpdateFunction(_FunctionHook, UpdateHook):
    pass


_FUNCTION_HOOKS: dict[str | None, Callable[[Any], Hook]] = {
    "forward": _ForwardFunction,
    "update": _UpdateFunction,
}


def as_hook(hook: Any, kind: str | None = None) -> Hook:
    """Return a hook unchanged, and a function as a hook of this kind; raise a `NotAHookError`."""
    if isinstance(hook, Hook):
        return hook
    if isinstance(hook, type) and issubclass(hook, Hook):
        raise NotAHookError(
            f"{hook.__name__} is a class; register an instance of it: {hook.__name__}()."
        )
    if kind in _FUNCTION_HOOKS and callable(hook) and not isinstance(hook, type):
        return _FUNCTION_HOOKS[kind](hook)
    raise NotAHookError(
        f"{show_value(hook)} is a {type(hook).__name__}, not a hook. A hook inherits from "
        "hookline.Hook and has on_… methods: class MyHook(hookline.Hook). A function is registered "
        "with kind='forward' or kind='update'. A configuration also has names of hooks, and "
        "mappings with 'name'."
    )
