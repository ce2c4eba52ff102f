"""Attaching and detaching the probes of a manager, as they are registered and toggled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hookline.dispatch import HookManager
from hookline.errors import NotProvidedError, RegistrationError
from hookline.interrupts import HeldInterrupts
from hookline.probes.attachment import Attachment
from hookline.probes.call import Site
from hookline.probes.probe import Probe
from hookline.probes.taps import Taps, arrange_taps


class ProbeSync:
    """Keeps the probes among a manager's hooks attached to a model while they are enabled.

    `context` has `step`, `epoch`, `step_in_progress` and `evaluating`.
    Probes that only observe see training, not evaluation.
    """

    def __init__(self, hooks: HookManager, model: Any, context: Any) -> None:
        self._hooks = hooks
        self._model: torch.nn.Module = model
        self._context = context
        self._attached: dict[str, Probe] = {}
        self._unchecked: list[Probe] = []  # attached since the last step, perhaps to unused modules
        self.waiting = False
        """Whether an edit waits for the end of the step to be attached or detached."""

    def sync(self, *, is_running: bool, within_step: bool = False) -> None:
        """Attach and detach probes as they are registered and toggled now.

        Before the loop runs, probes are only checked. Within a step, edits wait for its end,
        because forward and backward must see the same edits.
        """
        probes = {
            name: (hook, active)
            for name, hook, active in self._hooks.of_kind("probe")
            if isinstance(hook, Probe)
        }
        for name, (probe, _) in probes.items():
            self._check(name, probe)
        self.waiting = False
        with HeldInterrupts():
            for name, probe in list(self._attached.items()):
                is_registered = name in probes and probes[name][0] is probe
                if not is_registered and not self._must_wait(probe, within_step, enabled=False):
                    del self._attached[name]
                    probe.detach()
            for name, (probe, active) in probes.items():
                enabled = active and is_running
                if self._must_wait(probe, within_step, enabled=enabled):
                    continue
                if enabled:
                    self._attached[name] = probe
                    self._attach(name, probe)
                elif probe.attachment is not None:
                    probe.attachment.disable()
            arrange_probes(probe.attachment for probe, _ in probes.values() if probe.attachment)

    def close(self) -> None:
        """Remove all hooks of the probes from the model; what they have captured stays."""
        with HeldInterrupts():
            for probe in self._attached.values():
                if probe.attachment is not None and probe.attachment.context is self._context:
                    probe.attachment.close()

    def silence(self) -> None:
        """Hide all calls from the probes for good, also within a step: this process was forked."""
        for probe in self._attached.values():
            if probe.attachment is not None:
                probe.attachment.silence()

    def _must_wait(self, probe: Probe, within_step: bool, *, enabled: bool) -> bool:
        is_enabled = probe.attachment is not None and probe.attachment.enabled
        must_wait = within_step and probe.edits and enabled != is_enabled
        self.waiting |= must_wait
        return must_wait

    def _check(self, name: str, probe: Probe) -> None:
        """Raise if the probe may not be registered like this, or the model lacks its modules."""
        probe.check_permission()
        if probe.attachment is None:
            probe.choose(self._model)
        if probe.edits and self._hooks.is_scheduled(name):
            raise RegistrationError(
                f"The probe '{name}' edits what flows through the model. Edits take no schedule "
                "(every=, sample_rate=, from_epoch=), because validation belongs to no step. Use "
                f"enable_hook('{name}') and disable_hook('{name}') instead."
            )

    def _attach(self, name: str, probe: Probe) -> None:
        guard = None
        if probe.attachment is not None and probe.attachment.context is not self._context:
            probe.detach()  # from a session that has ended
        if probe.attachment is None:
            guard = self._make_guard(name, probe)
            self._unchecked.append(probe)
        probe.attach(self._model, name=name, context=self._context, guard=guard)

    def end_step(self) -> None:
        """Warn about modules that were not called in the first step of a probe."""
        unchecked, self._unchecked = self._unchecked, []
        for probe in unchecked:
            if probe.attachment is not None and probe.attachment.enabled:
                probe.attachment.check_calls()

    def _make_guard(self, name: str, probe: Probe) -> Callable[..., Any]:
        """Return the function that calls the probe's methods; observers only when they are due."""
        guarded, context = self._hooks.guard(name), self._context
        if probe.edits:
            return guarded
        is_due = self._make_schedule(name) if self._hooks.is_scheduled(name) else None

        def guard(function: Callable[..., Any], *args: Any) -> Any:
            attachment = probe.attachment
            if context.evaluating or (attachment is not None and not attachment.is_training):
                return None
            if is_due is not None:
                try:
                    if not is_due():
                        return None
                except NotProvidedError:
                    return guarded(is_due)  # it fails again, as a failure of the probe
            return guarded(function, *args)

        return guard

    def _make_schedule(self, name: str) -> Callable[[], bool]:
        """Return a function that says whether the step in progress is due, computed once a step."""
        hooks, context = self._hooks, self._context
        last_step: Any = None
        due = False

        def is_due() -> bool:
            nonlocal last_step, due
            step = context.step_in_progress, context.epoch
            if step != last_step:
                due = hooks.is_due(name)
                last_step = step
            return due

        return is_due


def arrange_probes(attachments: Iterable[Attachment]) -> None:
    """Have the probes of each module and tap called in this order."""
    sites: dict[Any, list[Site]] = {}
    taps: list[Taps] = []
    for attachment in attachments:
        for site in attachment.sites.values():
            if site.handles:
                sites.setdefault(site.module, []).append(site)
        taps += [attachment.taps] if attachment.taps is not None else []
    for several in sites.values():
        order = [site.handles[-1].id for site in several]  # PyTorch counts them up
        if order != sorted(order):
            for site in several:
                site.attachment.move_last(site)
    arrange_taps(taps)
