"""What the enabled hooks need to be seen of a bare loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hookline.dispatch import HookManager
from hookline.events import EVENTS
from hookline.hook import HookGroup

__all__ = ["HookNeeds", "saves_checkpoints"]


def saves_checkpoints(hook: Any) -> bool:
    """Return whether a hook saves checkpoints through the session."""
    return getattr(hook, "hookline_group", None) is HookGroup.CHECKPOINT


@dataclass(frozen=True)
class HookNeeds:
    """What is watched of a loop.

    Attributes:
        loss: the losses of steps and batches.
        grad_norm: the norm of gradients.
        clips: calls of torch's clipping functions.
        calls: calls of the model.
        backward: calls of backward.
        batch_metrics: the metrics of training batches.
        asks_for_loss: the methods that cannot be called without the loss.
    """

    loss: bool
    grad_norm: bool
    clips: bool
    calls: bool
    backward: bool
    batch_metrics: bool
    asks_for_loss: tuple[str, ...]

    @classmethod
    def of(cls, hooks: HookManager, *, has_run: bool) -> HookNeeds:
        """Return what these hooks need, and a run, if there is one."""
        fire = hooks.dispatchers
        wanted = {event: hooks.required_arguments(event, optional=True) for event in EVENTS}
        ends = ("on_step_end", "on_train_batch_end", "on_epoch_end")
        loss = has_run or any({"loss", "ctx", "metrics"} & wanted[event].keys() for event in ends)
        loss |= any("state" in names for names in wanted.values())
        norm = any({"grad_norm", "ctx"} & names.keys() for names in wanted.values())
        clips = norm or bool(fire.on_gradients_ready or fire.update or fire.on_gradient_clip)
        asking = (
            label
            for event in ("on_step_end", "on_train_batch_end")
            for label in hooks.required_arguments(event).get("loss", ())
        )
        saves = any(saves_checkpoints(hooks.get_hook(name)) for name in hooks)
        return cls(
            loss=loss,
            grad_norm=norm,
            clips=clips,
            calls=bool(fire.on_before_forward or fire.on_after_forward or fire.forward),
            # A checkpoint is not saved between a backward and the step.
            backward=loss or clips or saves or fire.on_after_backward is not None,
            batch_metrics="metrics" in wanted["on_train_batch_end"],
            asks_for_loss=tuple(asking),
        )
