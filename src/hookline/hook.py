"""Hook: what a user subclasses.

A method asks for what it wants: the parameters it declares are the arguments it gets. Toggles,
schedules, order and accounts belong to the registration, so nothing here collides with a user's
own attributes, and `super().__init__()` is never needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar

__all__ = ["ForwardHook", "Hook", "Rank", "UpdateHook", "as_hook"]


class Rank(IntEnum):
    """Where a hook stands among others when nobody says `before=` or `after=`.

    What observes comes before what decides, and both before what saves and writes, so that what
    is saved and written is complete.
    """

    USER = 0
    MONITOR = 1
    CONTROL = 2
    CHECKPOINT = 3
    WRITER = 4
    DEFAULT = 5  # what every trainer has


class Hook:
    """Something that training calls. Subclass it and write the `on_…` methods you need.

    Each method declares the arguments it wants, by name, in any order:

        class Watch(hookline.Hook):
            def on_step_end(self, step, loss):
                print(step, loss)

    What can be asked for is listed with each method below, and on the events page. A misspelled
    event or parameter is an error when the hook is registered.

    Args:
        name: the hook's name in a run; without one, the class name in snake_case.
    """

    critical: ClassVar[bool] = False
    """Training depends on this hook: when it fails, training stops."""

    intervenes: ClassVar[bool] = False
    """This hook means to change training; without it, a hook only observes."""

    hookline_kind: ClassVar[str] = "loop"
    hookline_function: Callable[..., Any] | None = None
    hookline_rank: ClassVar[Rank] = Rank.USER
    hookline_name: str | None = None
    hookline_options: Mapping[str, Any] = MappingProxyType({})
    """What the hook was made with, where that is known: the manifest lists it."""

    hookline_no_op: ClassVar[bool] = False
    """A forward hook or update that looks at nothing: nothing is made ready for it."""

    hookline_optional_events: ClassVar[frozenset[str]] = frozenset()
    """Events that it can do without: a loop that does not tell them is not asked for them."""

    hookline_cost: ClassVar[str] = ""
    """What it costs, in one sentence: `describe()` shows it."""

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            self.hookline_name = name

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs. By default a hook saves nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    # -- events: written from events.py by `make generate`; edit there ----------------------------

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        """Training begins."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_train_start`."""

    def on_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        """An epoch begins.

        Its own arguments: `epoch`.
        """

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_epoch_start`."""

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """A training batch was drawn.

        Its own arguments: `batch`, `batch_idx`, `dataloader_idx` (`loader_idx`), `dataloader_name`
        (`loader_name`).
        """

    def on_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_train_batch_start`."""

    def on_batch_begin(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_train_batch_start`."""

    def on_before_forward(self, *args: Any, **kwargs: Any) -> None:
        """The model is about to be called.

        Its own arguments: `batch`.
        """

    def on_after_forward(self, *args: Any, **kwargs: Any) -> None:
        """The model's outermost call has returned.

        Its own arguments: `outputs`.
        """

    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        """The loss is known and will be differentiated.

        Its own arguments: `loss`.
        """

    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        """Backward has run."""

    def on_gradients_ready(self, *args: Any, **kwargs: Any) -> None:
        """Gradients are accumulated and unscaled; nothing has changed them yet.

        Its own arguments: `optimizer_idx`.
        """

    def on_gradient_clip(self, *args: Any, **kwargs: Any) -> None:
        """Gradients were clipped.

        Its own arguments: `grad_norm`, `optimizer_idx`.
        """

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer is about to use the gradients, exactly as they are now.

        Its own arguments: `optimizer_idx`.
        """

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_before_optimizer_step`."""

    def on_after_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer has stepped.

        Its own arguments: `optimizer_idx`.
        """

    def on_step_skipped(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer did not step.

        Its own arguments: `reason`, `optimizer_idx`.
        """

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A training batch is done.

        Its own arguments: `batch`, `batch_idx`, `dataloader_idx` (`loader_idx`), `dataloader_name`
        (`loader_name`), `metrics`, `loss`.
        """

    def on_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_train_batch_end`."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """A step is done, completed or skipped; gradients are still there.

        Its own arguments: `ctx`, `loss`, `grad_norm`, `lr`.
        """

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        """Validation begins.

        Its own arguments: `epoch`.
        """

    def on_eval_start(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_validation_start`."""

    def on_eval_begin(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_validation_start`."""

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """A validation batch was drawn.

        Its own arguments: `batch`, `batch_idx`, `dataloader_idx` (`loader_idx`), `dataloader_name`
        (`loader_name`).
        """

    def on_eval_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_validation_batch_start`."""

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A validation batch is done.

        Its own arguments: `batch`, `batch_idx`, `dataloader_idx` (`loader_idx`), `dataloader_name`
        (`loader_name`), `metrics`, `loss`.
        """

    def on_eval_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_validation_batch_end`."""

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        """Validation is done.

        Its own arguments: `epoch`, `metrics`.
        """

    def on_eval_end(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_validation_end`."""

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """An epoch is done.

        Its own arguments: `epoch`, `metrics`.
        """

    def on_checkpoint_save(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint is durable and complete.

        Its own arguments: `checkpoint_path` (`path`), `step`.
        """

    def on_checkpoint_load(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint was restored, all of it.

        Its own arguments: `checkpoint_path` (`path`), `step`.
        """

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """Training failed; the exception goes on after all hooks have seen it.

        Its own arguments: `exception`.
        """

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Training is over, however it ended."""

    def on_training_end(self, *args: Any, **kwargs: Any) -> None:
        """Another name for `on_train_end`."""

    # -- end of events ----------------------------------------------------------------------------


class ForwardHook(Hook):
    """Observes what the model returns, for every batch, before the loss.

        class Scale(hookline.ForwardHook):
            def __call__(self, activations):
                print(activations.abs().mean())

    `__call__` may also ask, by name, for what every event has, such as `step` or `trainer`. What it
    gets is detached; to change it in place, or to draw from training's random numbers, is a fatal
    error that names the hook.
    """

    hookline_kind = "forward"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Look at `activations`."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__(self, activations).")


class UpdateHook(Hook):
    """Transforms gradients, between backward and optimizer step.

        class Half(hookline.UpdateHook):
            def __call__(self, gradients):
                return {name: gradient / 2 for name, gradient in gradients.items()}

    `gradients` maps names of parameters to their gradients, accumulated and unscaled, before
    clipping, for each optimizer that is due. What is returned is used instead; a parameter that is
    left out keeps its gradient, and None changes nothing. `__call__` may also ask, by name, for
    `optimizer_idx` and for what every event has. When it fails, training stops.
    """

    hookline_kind = "update"
    critical = True
    intervenes = True

    def __call__(self, *args: Any, **kwargs: Any) -> Mapping[str, Any] | None:
        """Return the gradients to use instead of `gradients`."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__(self, gradients).")


class _OfFunction(Hook):
    """Makes a hook of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.hookline_function = function


class _ForwardFunction(_OfFunction, ForwardHook):
    pass


class _UpdateFunction(_OfFunction, UpdateHook):
    pass


_OF_FUNCTIONS: dict[str | None, Callable[[Any], Hook]] = {
    "forward": _ForwardFunction,
    "update": _UpdateFunction,
}


def as_hook(thing: Any, kind: str | None) -> Any:
    """Return a function as a hook of this kind; anything else as it is."""
    if kind not in _OF_FUNCTIONS or isinstance(thing, Hook | type) or not callable(thing):
        return thing
    return _OF_FUNCTIONS[kind](thing)
