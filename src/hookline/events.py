"""The one list of events, their arguments and the loop map.

The base class, the dispatch, the checks at registration and the reference page are derived from
`EVENTS` (`make generate` writes what has to stand in a file). `LOOP_MAP` stands beside it; a test
compares it with the order recorded in a real loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from hookline.errors import UnknownEventError, nearest

__all__ = ["COMMON", "EVENTS", "FLOWS", "LOOP_MAP", "Argument", "Event", "find_event"]


@dataclass(frozen=True)
class Argument:
    """Something an event carries; hooks ask for it by its name or an alias."""

    name: str
    doc: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Event:
    """A moment of training that hooks are called at.

    `per_step` events happen in every batch or step: schedules (`every=100`) thin them out. The
    others (starts, ends, epochs, validation, checkpoints) always reach a hook, so that it can set
    up and clean up.
    """

    name: str
    doc: str
    own: tuple[Argument, ...] = ()
    aliases: tuple[str, ...] = ()
    per_step: bool = False

    @cached_property
    def arguments(self) -> Mapping[str, Argument]:
        """What the event carries, its own arguments first, by their real names."""
        every = {argument.name: argument for argument in (*COMMON, *self.own)}
        own_first = {argument.name: argument for argument in self.own}
        return MappingProxyType({**own_first, **every})

    @cached_property
    def parameters(self) -> Mapping[str, str]:
        """Every name a hook's parameter may have, with the argument's real name."""
        return MappingProxyType(
            {
                name: argument.name
                for argument in self.arguments.values()
                for name in (argument.name, *argument.aliases)
            }
        )


COMMON = (
    Argument("trainer", "the trainer, or what stands in for it in somebody else's loop"),
    Argument("model", "the model"),
    Argument("optimizer", "the first optimizer"),
    Argument("optimizers", "all optimizers, in a list"),
    Argument("config", "the run's configuration"),
    Argument("state", "a mapping with the state of training"),
    Argument("epoch", "the epoch, from 0"),
    Argument("step", "completed optimizer steps"),
    Argument("tokens_seen", "tokens trained on so far"),
    Argument("status", "how training stands, or how it ended"),
    Argument("run", "the run and its folder"),
)

_BATCH = (
    Argument("batch", "the batch as the loader gave it"),
    Argument("batch_idx", "the batch's number within its loader and epoch, from 0"),
    Argument("dataloader_idx", "the loader's number, from 0", ("loader_idx",)),
    Argument("dataloader_name", "the loader's name", ("loader_name",)),
)
_METRICS = Argument("metrics", "a mutable mapping from name to number")
_LOSS = Argument("loss", "the batch's own loss, a number")
_EPOCH = Argument("epoch", "the epoch, from 0")
_OPTIMIZER = Argument("optimizer_idx", "the optimizer's number, from 0")
_CHECKPOINT = (
    Argument("checkpoint_path", "where the checkpoint is", ("path",)),
    Argument("step", "the checkpoint's step"),
)

EVENTS: Mapping[str, Event] = MappingProxyType(
    {
        event.name: event
        for event in (
            Event("on_train_start", "Training begins.", aliases=("on_train_begin",)),
            Event("on_epoch_start", "An epoch begins.", (_EPOCH,), ("on_epoch_begin",)),
            Event(
                "on_train_batch_start",
                "A training batch was drawn.",
                _BATCH,
                ("on_batch_start", "on_batch_begin"),
                per_step=True,
            ),
            Event(
                "on_before_forward",
                "The model is about to be called.",
                (Argument("batch", "the batch as the loader gave it"),),
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
                "The loss is known and will be differentiated.",
                (Argument("loss", "the loss, a tensor, as it will be differentiated"),),
                per_step=True,
            ),
            Event("on_after_backward", "Backward has run.", per_step=True),
            Event(
                "on_gradients_ready",
                "Gradients are accumulated and unscaled; nothing has changed them yet.",
                (_OPTIMIZER,),
                per_step=True,
            ),
            Event(
                "on_gradient_clip",
                "Gradients were clipped.",
                (Argument("grad_norm", "the norm before clipping, a number"), _OPTIMIZER),
                per_step=True,
            ),
            Event(
                "on_before_optimizer_step",
                "The optimizer is about to use the gradients, exactly as they are now.",
                (_OPTIMIZER,),
                ("on_pre_optimizer_step",),
                per_step=True,
            ),
            Event(
                "on_after_optimizer_step",
                "The optimizer has stepped.",
                (_OPTIMIZER,),
                per_step=True,
            ),
            Event(
                "on_step_skipped",
                "The optimizer did not step.",
                (Argument("reason", "why, in words"), _OPTIMIZER),
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
                "A step is done, completed or skipped; gradients are still there.",
                (
                    Argument("ctx", "the step as a `StepContext`"),
                    Argument("loss", "the mean loss of the step's batches, a number"),
                    Argument("grad_norm", "the norm of the gradients, a number"),
                    Argument("lr", "the learning rate that this step used"),
                ),
                per_step=True,
            ),
            Event(
                "on_validation_start",
                "Validation begins.",
                (_EPOCH,),
                ("on_eval_start", "on_eval_begin"),
            ),
            Event(
                "on_validation_batch_start",
                "A validation batch was drawn.",
                _BATCH,
                ("on_eval_batch_start",),
            ),
            Event(
                "on_validation_batch_end",
                "A validation batch is done.",
                (*_BATCH, _METRICS, _LOSS),
                ("on_eval_batch_end",),
            ),
            Event(
                "on_validation_end",
                "Validation is done.",
                (_EPOCH, _METRICS),
                ("on_eval_end",),
            ),
            Event("on_epoch_end", "An epoch is done.", (_EPOCH, _METRICS)),
            Event("on_checkpoint_save", "A checkpoint is durable and complete.", _CHECKPOINT),
            Event("on_checkpoint_load", "A checkpoint was restored, all of it.", _CHECKPOINT),
            Event(
                "on_exception",
                "Training failed; the exception goes on after all hooks have seen it.",
                (Argument("exception", "the exception"),),
            ),
            Event(
                "on_train_end",
                "Training is over, however it ended.",
                aliases=("on_training_end",),
            ),
        )
    }
)

FLOWS: Mapping[str, Event] = MappingProxyType(
    {
        event.name: event
        for event in (
            Event(
                "forward",
                "The model's outermost call has returned: forward hooks observe.",
                (
                    Argument("activations", "what the model returned, detached"),
                    Argument("observation", "carries the call: sees that nothing is changed"),
                ),
                per_step=True,
            ),
            Event(
                "update",
                "Gradients are ready: updates transform them, for each optimizer that is due.",
                (
                    Argument("gradients", "gradients by parameter name; carries the call"),
                    Argument("optimizer_idx", "which optimizer it is, from 0"),
                ),
                per_step=True,
            ),
        )
    }
)
"""What flows through the model: not events, but moments at which forward hooks and updates run."""

NAMES: Mapping[str, str] = MappingProxyType(
    {name: event.name for event in EVENTS.values() for name in (event.name, *event.aliases)}
)
"""Every event name and alias, with the event's real name."""


def find_event(name: str) -> Event:
    """Return the event of this name or alias; the error names the nearest one."""
    try:
        return EVENTS[NAMES[name]]
    except KeyError:
        raise UnknownEventError(
            f"There is no event '{name}'.{nearest(name, NAMES)} "
            f"The events are: {', '.join(EVENTS)}."
        ) from None


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
    zero_grad · then, at this boundary: validation · checkpoint · decisions (stop, toggles)
  validation: on_validation_start · batches · on_validation_end
  on_epoch_end
on_train_end                 always, also after an exception or a stop; on_exception before it
"""
