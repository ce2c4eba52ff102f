"""Gradients that a loop clips with torch's functions: events, and the norm before clipping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hookline.dispatch import HookManager
from hookline.integrations.bare_loop.clip_watch import (
    ClipCall,
    add_clip_listener,
    remove_clip_listener,
)
from hookline.loop.event_context import EventContext, gradients_of, norm_or_error
from hookline.tensors.global_norm import global_norm
from hookline.tensors.sharded import whole

__all__ = ["ClipTracker", "Versions", "gradient_versions"]

Versions = tuple[tuple[int, int], ...]
"""For each gradient the tensor's id, and how often it was changed in place."""


def gradient_versions(optimizer: torch.optim.Optimizer) -> Versions:
    """Return a value that differs after a gradient was changed in place or replaced."""
    return tuple((id(gradient), gradient._version) for gradient in gradients_of(optimizer))


class ClipTracker:
    """Listens to torch's clipping functions, for the parameters of the attached optimizers.

    Args:
        context: gets the norms.
        hooks: have `on_gradient_clip`, and updates.
        prepare: called with an optimizer's number and the function's name before gradients are
            clipped; fires `on_gradients_ready` and returns whether the call counts.

    Attributes:
        wants_norm: whether a hook asks for the norm.
        seen: whether the loop has ever clipped.
    """

    def __init__(
        self,
        context: EventContext,
        hooks: HookManager,
        prepare: Callable[[int, str], bool],
    ) -> None:
        self.wants_norm = False
        self.seen = False
        self._context = context
        self._dispatchers = hooks.dispatchers
        self._prepare = prepare
        self._clipped: dict[int, Versions] = {}  # by optimizer, after the step's latest clip
        self._is_listening = False
        self._call: ClipCall | None = None
        self._concerned: list[int] = []

    def listen(self, on: bool) -> None:
        """Listen to clipping calls, or stop doing so."""
        if on != self._is_listening:
            (add_clip_listener if on else remove_clip_listener)(self)
            self._is_listening = on

    def was_clipped(self, i: int, versions: Versions) -> bool:
        """Return whether these gradients are as the step's latest clip has left them."""
        return bool(versions) and self._clipped.get(i) == versions

    def forget(self, i: int) -> None:
        """Forget the clips of gradients that no step has used."""
        self._clipped.pop(i, None)
        self._context.norms.pop(i, None)

    def end_step(self) -> None:
        """Forget the step's clips."""
        self._clipped.clear()
        self._context.norms.clear()

    def before_clip(self, call: ClipCall) -> None:
        """Fire `on_gradients_ready` before the step's first clip, and keep the norm."""
        if call.function == "get_total_norm":
            if self._dispatchers.update is not None:
                self._update_gradients(call)
            return
        given = self._optimizers_of(set(map(id, call.tensors)))
        concerned = [i for i in given if self._prepare(i, call.function)]
        if not concerned:
            return
        self.seen = True
        self._call, self._concerned = call, concerned
        for i in concerned if self._norm_is_wanted() else ():
            gradients = gradients_of(self._context.optimizers[i])
            if i not in self._clipped and not _has_norm_of(call, gradients):
                self._context.norms[i] = norm_or_error(partial(global_norm, gradients))

    def _norm_is_wanted(self) -> bool:
        """Return whether a hook asks for the norm; one of any rank, if gradients are sharded."""
        context = self._context
        if context.norm_schedule is None:
            return self.wants_norm
        return context.norm_schedule.is_due(context.step_in_progress, context.known("epoch"))

    def _optimizers_of(self, given: set[int]) -> list[int]:
        """Return the numbers of the optimizers that have one of these parameters, given by id."""
        return [
            i
            for i, optimizer in enumerate(self._context.optimizers)
            if any(id(p) in given for group in optimizer.param_groups for p in group["params"])
        ]

    def _update_gradients(self, call: ClipCall) -> None:
        """Run updates before the loop computes a norm, of the updated gradients then."""
        owners = {
            id(parameter.grad): parameter
            for optimizer in self._context.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        given = {id(owners[id(tensor)]) for tensor in call.tensors if id(tensor) in owners}
        for i in self._optimizers_of(given):
            self._prepare(i, call.function)
        updated = [owners[id(t)].grad if id(t) in owners else t for t in call.tensors]
        call.tensors = [gradient for gradient in updated if gradient is not None]

    def after_clip(self, call: ClipCall) -> None:
        """Fire `on_gradient_clip` after the step's first clip."""
        if call is not self._call:
            return
        self._call = None
        context = self._context
        for i in self._concerned:
            is_first = i not in self._clipped
            self._clipped[i] = gradient_versions(context.optimizers[i])
            if not is_first:
                continue
            if call.result is not None and self._norm_is_wanted():
                context.norms.setdefault(i, whole(call.result))  # all ranks clip together
            if self._dispatchers.on_gradient_clip is not None:
                context.optimizer_idx = i
                context.clipped_norm = context.norms.get(i)
                self._dispatchers.on_gradient_clip(context)
                context.clipped_norm = None


def _has_norm_of(call: ClipCall, gradients: list[torch.Tensor]) -> bool:
    """Return whether the call returns the 2-norm of exactly these gradients."""
    clipped = {id(t.grad) for t in call.tensors if t.grad is not None}
    is_norm = call.function == "clip_grad_norm_" and call.norm_type == 2.0
    return is_norm and clipped == set(map(id, gradients))
