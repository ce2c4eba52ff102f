"""The events, their arguments, and the order in which a loop fires them.

The methods of `Hook`, dispatch, the checks at registration and the reference page are derived from
`EVENTS` (`make generate` writes the parts that are files). A test compares `LOOP_MAP` with the
order in a real loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from hookline.arguments import show_value
from hookline.errors import UnknownEventError, nearest


@dataclass(frozen=True)
class Argument:
    """An argument of an event; hooks ask for it by its name or an alias."""

    name: str
    doc: str
    aliases: tuple[str, ...] = ()
    form: str = ""
    """The type that hooks get by default: "float" or "str"; empty for the value as it is."""


@dataclass(frozen=True)
class Event:
    """A point in training at which hooks are called.

    Schedules (`every=100`) apply to `per_step` events, which happen in every batch or step. Hooks
    always get the others (starts, ends, epochs, validation, checkpoints), so that they can set up
    and clean up.
    """

    name: str
    doc: str
    own: tuple[Argument, ...] = ()
    aliases: tuple[str, ...] = ()
    per_step: bool = False

    @cached_property
    def arguments(self) -> Mapping[str, Argument]:
        """The arguments by name, the event's own before those that all events have."""
        own = {argument.name: argument for argument in self.own}
        common = {a.name: a for a in COMMON if a.name not in own}
        return MappingProxyType({**own, **common})

    @cached_property
    def parameters(self) -> Mapping[str, str]:
        """Every name and alias that a hook's parameter may have, with the argument's name."""
        return MappingProxyType(
            {
                name: argument.name
                for argument in self.arguments.values()
                for name in (argument.name, *argument.aliases)
            }
        )


COMMON = (
    Argument("trainer", "the trainer, or the session in another loop"),
    Argument("model", "the model"),
    Argument("optimizer", "the first optimizer"),
    Argument("optimizers", "a list of all optimizers"),
    Argument("config", "the run's configuration"),
    Argument("state", "a mapping with the state of training"),
    Argument("epoch", "the epoch, from 0"),
    Argument("step", "completed optimizer steps"),
    Argument("tokens_seen", "tokens trained on so far"),
    Argument("status", "`training`, or how training ended"),
    Argument("run", "the run and its folder"),
)

_BATCH = (
    Argument("batch", "the batch from the data loader"),
    Argument("batch_idx", "the index of the batch in its loader and epoch, from 0"),
    Argument("dataloader_idx", "the index of the loader, from 0", ("loader_idx",)),
    Argument("dataloader_name", "the loader's name", ("loader_name",)),
)
_METRICS = Argument("metrics", "a mutable mapping from name to number")
_LOSS = Argument("loss", "the batch's own loss, a number", form="float")
_GRAD_NORM = Argument("grad_norm", "the gradient norm before clipping, a number", form="float")
_EPOCH = Argument("epoch", "the epoch, from 0")
_OPTIMIZER = Argument("optimizer_idx", "the index of the optimizer, from 0")
_CHECKPOINT = (
    Argument("checkpoint_path", "the path of the checkpoint", ("path",), "str"),
    Argument("step", "the checkpoint's step"),
)


def _by_name(*events: Event) -> Mapping[str, Event]:
    return MappingProxyType({event.name: event for event in events})


EVENTS: Mapping[str, Event] = _by_name(
    Event("on_train_start", "Training begins.", aliases=("on_train_begin",)),
    Event("on_epoch_start", "An epoch begins.", (_EPOCH,), ("on_epoch_begin",)),
    Event(
        "on_train_batch_start",
        "A training batch was loaded.",
        _BATCH,
        ("on_batch_start", "on_batch_begin"),
        per_step=True,
    ),
    Event(
        "on_before_forward",
        "The model is about to be called.",
        (Argument("batch", "the batch from the data loader"),),
        per_step=True,
    ),
    Event(
        "on_after_forward",
        "The model's outermost call has returned.",
        (Argument("outputs", "what the model returned"),),
        per_step=True,
    ),
    Event(
        "on_before_backward",
        "The loss is computed; backward is about to run.",
        (Argument("loss", "the loss tensor on which backward is called"),),
        per_step=True,
    ),
    Event("on_after_backward", "Backward has run.", per_step=True),
    Event(
        "on_gradients_ready",
        "Gradients are accumulated and unscaled, before updates and clipping.",
        (_OPTIMIZER,),
        per_step=True,
    ),
    Event(
        "on_gradient_clip",
        "Gradients were clipped.",
        (_GRAD_NORM, _OPTIMIZER),
        per_step=True,
    ),
    Event(
        "on_before_optimizer_step",
        "The optimizer is about to step with the current gradients.",
        (_OPTIMIZER,),
        ("on_pre_optimizer_step",),
        per_step=True,
    ),
    Event("on_after_optimizer_step", "The optimizer has stepped.", (_OPTIMIZER,), per_step=True),
    Event(
        "on_step_skipped",
        "The optimizer did not step.",
        (Argument("reason", "why the step was skipped"), _OPTIMIZER),
        per_step=True,
    ),
    Event(
        "on_train_batch_end",
        "A training batch is done.",
        (*_BATCH, _METRICS, _LOSS),
        ("on_batch_end",),
        per_step=True,
    ),
    Event(
        "on_step_end",
        "A step is done, completed or skipped; gradients are not zeroed yet.",
        (
            Argument("ctx", "the step as a `StepContext`"),
            Argument("loss", "the mean loss of the step's batches, a number", form="float"),
            _GRAD_NORM,
            Argument("lr", "the learning rate that this step used", form="float"),
        ),
        per_step=True,
    ),
    Event(
        "on_validation_start", "Validation begins.", (_EPOCH,), ("on_eval_start", "on_eval_begin")
    ),
    Event(
        "on_validation_batch_start",
        "A validation batch was loaded.",
        _BATCH,
        ("on_eval_batch_start",),
    ),
    Event(
        "on_validation_batch_end",
        "A validation batch is done.",
        (*_BATCH, _METRICS, _LOSS),
        ("on_eval_batch_end",),
    ),
    Event("on_validation_end", "Validation is done.", (_EPOCH, _METRICS), ("on_eval_end",)),
    Event("on_epoch_end", "An epoch is done.", (_EPOCH, _METRICS)),
    Event("on_checkpoint_save", "A checkpoint is durable and complete.", _CHECKPOINT),
    Event("on_checkpoint_load", "A checkpoint was restored completely.", _CHECKPOINT),
    Event(
        "on_exception",
        "Training failed; the exception is re-raised after all hooks were called.",
        (Argument("exception", "the exception"),),
    ),
    Event(
        "on_train_end",
        "Training has ended, also after an exception or a stop.",
        aliases=("on_training_end",),
    ),
)

FLOWS: Mapping[str, Event] = _by_name(
    Event(
        "forward",
        "Forward hooks observe what the model's outermost call returned.",
        (
            Argument("activations", "what the model returned, detached"),
            Argument("observation", "calls the hook and checks that it changes nothing"),
        ),
        per_step=True,
    ),
    Event(
        "update",
        "Updates transform the gradients of each optimizer that is due.",
        (
            Argument("gradients", "gradients by parameter name; calls the hook"),
            Argument("optimizer_idx", "the index of the optimizer, from 0"),
        ),
        per_step=True,
    ),
)
"""The calls of forward hooks and updates, which are dispatched like events."""

NAMES: Mapping[str, str] = MappingProxyType(
    {name: event.name for event in EVENTS.values() for name in (event.name, *event.aliases)}
)
"""Every event name and alias, with the event's name."""


def find_event(name: str) -> Event:
    """Return the event of this name or alias; raise an `UnknownEventError`."""
    event = NAMES.get(name) if isinstance(name, str) else None
    if event is None:
        hint = nearest(name, NAMES) if isinstance(name, str) else ""
        raise UnknownEventError(
            f"There is no event {show_value(name)}.{hint} The events are: {', '.join(EVENTS)}."
        )
    return EVENTS[event]


LOOP_MAP = """\
on_train_start
  on_epoch_start
    on_train_batch_start
      on_before_forward · forward (probes see activations) · on_after_forward
      loss · on_before_backward · backward · on_after_backward
      -- when this batch completes a step, for each optimizer that is due --
      unscale (AMP) · on_gradients_ready · updates transform · clip · on_gradient_clip
      on_before_optimizer_step · optimizer.step · on_after_optimizer_step · scheduler
      (or on_step_skipped: non-finite gradients, AMP overflow, trainer.skip_optimizer_step)
    on_train_batch_end
    on_step_end              (also after a skipped step, with `ctx.skipped`)
    zero_grad · then, at this boundary: validation · checkpoint · requests (stop, toggles)
  validation: on_validation_start · batches · on_validation_end
  on_epoch_end
on_train_end                 always, also after an exception or a stop; on_exception before it
"""
