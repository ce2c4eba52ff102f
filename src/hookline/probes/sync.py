"""Keeps the probes of a loop on its model: on while they are enabled, off when they are not."""

from __future__ import annotations

from typing import Any

import torch

from hookline.dispatch import HookManager
from hookline.errors import NotSuppliedError, RegistrationError
from hookline.probes.probe import Probe

__all__ = ["ProbeSync"]


class ProbeSync:
    """The probes among a manager's hooks, and the model they are on.

    Args:
        hooks: the manager.
        model: the model.
        context: has `step` and `epoch`, and says when it is `evaluating`: what only observes looks
            at training alone.
    """

    def __init__(self, hooks: HookManager, model: torch.nn.Module, context: Any) -> None:
        self._hooks = hooks
        self._model = model
        self._context = context
        self._attached: dict[str, Probe] = {}
        self._new: list[Probe] = []  # of which it is not known yet whether they see anything
        self.waiting = False
        """Whether an edit waits for the end of the step to be put on or taken off."""

    def sync(self, *, on: bool, within_step: bool = False) -> None:
        """Put probes on the model and take them off, as they are registered and toggled now.

        Args:
            on: whether the loop runs; a probe that comes before it is checked and not yet attached.
            within_step: whether a backward may still be to come: then edits wait, for it has to
                see what its forward saw.
        """
        probes = {
            name: (hook, active)
            for name, hook, active in self._hooks.of_kind("probe")
            if isinstance(hook, Probe)
        }
        for name, (probe, _) in probes.items():
            probe.check_permission()
            if probe.edits and self._hooks.is_scheduled(name):
                raise RegistrationError(
                    f"'{name}' edits what flows through the model, and schedules (every=, "
                    "sample_rate=, from_epoch=) are for what observes: validation is in no step. "
                    f"Use enable_hook('{name}') and disable_hook('{name}')."
                )
        self.waiting = False
        for name, probe in list(self._attached.items()):
            if probes.get(name, (None, False))[0] is not probe and not self._waits(
                probe, within_step, on=False
            ):
                del self._attached[name]
                probe.detach()
        for name, (probe, active) in probes.items():
            if self._waits(probe, within_step, on=active and on):
                probe.choose(self._model)
            elif active and on:
                self._attached[name] = probe
                guard = None
                if probe.attachment is None:
                    guard = self._guard(name, probe)
                    self._new.append(probe)
                probe.attach(self._model, name=name, context=self._context, guard=guard)
            elif probe.attachment is not None:
                probe.attachment.off()
            else:
                probe.choose(self._model)  # a name that is not there is said now

    def _waits(self, probe: Probe, within_step: bool, *, on: bool) -> bool:
        is_on = probe.attachment is not None and probe.attachment.enabled
        waits = within_step and probe.edits and on != is_on
        self.waiting |= waits
        return waits

    def end_step(self) -> None:
        """A step is over: probes that saw nothing in their first one are named."""
        new, self._new = self._new, []
        for probe in new:
            if probe.attachment is not None and probe.attachment.enabled:
                probe.attachment.end_step()

    def _guard(self, name: str, probe: Probe) -> Any:
        """What calls a probe. Who observes sees training, in the steps of its schedule."""
        guarded, context = self._hooks.guard(name), self._context
        if probe.edits:
            return guarded
        is_due = self._due(name) if self._hooks.is_scheduled(name) else None

        def guard(function: Any, *args: Any) -> Any:
            attachment = probe.attachment
            if context.evaluating or (attachment is not None and not attachment.trains):
                return None
            if is_due is not None:
                try:
                    if not is_due():
                        return None
                except NotSuppliedError as error:
                    return guarded(from_epoch, error)
            return guarded(function, *args)

        return guard

    def _due(self, name: str) -> Any:
        """Whether the schedule has the step in progress: found out once for each step."""
        hooks, context = self._hooks, self._context
        last: Any = None
        due = False

        def is_due() -> bool:
            nonlocal last, due
            now = context.step_in_progress, context.epoch
            if now != last:
                due = hooks.is_due(name)
                last = now
            return due

        return is_due


def from_epoch(error: NotSuppliedError) -> None:
    """What fails where a schedule needs what the loop has not told."""
    raise error
