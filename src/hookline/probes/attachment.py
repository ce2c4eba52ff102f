"""The connection between one probe and the modules of a model, eager or compiled.

An `Attachment` registers PyTorch's forward hooks on the modules of one probe and removes exactly
these. For each call of a module it makes a `Call` and passes it to the probe: before the module
runs, if the probe wants that, and again after it. These cases need care:

- A recomputation by activation checkpointing is not a new call. Observers do not see it. An edit is
  applied again, or gradients would be silently wrong.
- In a compiled model a hook becomes an operator that checks whether the probe is enabled, so that
  toggling does not recompile. In an eager model the hooks of a disabled probe are removed.
- A copy or a pickle of the model has no probe.
- A module may raise, also when a recomputation stops early. `always_call=True` ends the call then.
- A probe that only observes must not change training. The calls of a user's own class are checked;
  built-in probes check the functions that they are given.
- Within a functional transform (`torch.func.vmap`, `grad` …) tensors stand for others and cannot be
  read or kept. Observers do not see these calls. An edit is applied.
- Calls are counted within the outermost call of the model, separately in each thread. Where that is
  not seen, because another method of the model is called, they are counted within the step in
  training, and each is a forward of its own elsewhere.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from hookline.errors import ProbeError, RandomNumberError
from hookline.interrupts import HeldInterrupts
from hookline.probes.call import Call, ThreadLocal
from hookline.probes.module_callback import (
    ForwardCallback,
    ModuleCallback,
    arrange_sites,
    register_receiver,
    unregister_receiver,
)
from hookline.probes.recomputation import has_gradients, is_recomputing, running_modules
from hookline.probes.taps import Taps
from hookline.probes.uncalled_modules import UncalledModules
from hookline.tensors.hidden_hooks import hide_hooks, unhide_hooks
from hookline.tensors.observation import Observation

if TYPE_CHECKING:
    from hookline.probes.probe import Probe

__all__ = ["Attachment", "Site"]

log = logging.getLogger("hookline")

_graph_task_id = torch._C._current_graph_task_id  # `is_recomputing`, for where every µs counts
_in_transform = torch._C._are_functorch_transforms_active


class Attachment:
    """One probe on some modules.

    Args:
        probe: The probe.
        sites: The modules, by name.
        root: The model whose outermost call is one forward; None if each module is its own.
        context: Has `step` and `epoch` in training; None elsewhere.
        guard: Calls the probe's methods; a trainer's also isolates and counts failures.
        taps: Names or globs of values in the model's code that the probe sees, too.
    """

    def __init__(
        self,
        probe: Probe,
        sites: Mapping[str, torch.nn.Module],
        root: torch.nn.Module | None = None,
        context: Any = None,
        guard: Callable[..., Any] | None = None,
        taps: Iterable[str] = (),
    ) -> None:
        self.probe = probe
        self.sites = {name: Site(self, name, module) for name, module in sites.items()}
        self.root = root
        self.context = context
        self.guard: Callable[..., Any] = guard or self.call_directly
        self.before, self.after = _check_observer(probe, "before"), _check_observer(probe, "after")
        self.enabled = False
        self.flag = torch.zeros((), dtype=torch.bool, device="cpu")
        """Whether the probe is enabled, for compiled edits."""
        self.taps = Taps(self, taps, lambda name: Site(self, name, None)) if taps else None
        self.local = ThreadLocal()
        self._forward_numbers = count(1)
        self._boundaries: list[ForwardCallback] = []
        self._warned_transform = False
        self.uncalled_modules = UncalledModules(self)

    def enable(self) -> None:
        """Let the probe see calls from now on; if that fails, the model is as before."""
        if self.enabled:
            return
        try:
            with HeldInterrupts():
                self._register()
        except BaseException:
            self.close()
            raise

    def _register(self) -> None:
        self.enabled = True
        for site in self.sites.values():
            site.enabled = True
            if not site.handles:
                site.attach()
        outermost = self._outermost()
        if outermost is not None and not self._boundaries:
            start = ForwardCallback(self._start, is_end=False)
            end = ForwardCallback(self._end, is_end=True)
            self._boundaries = [start, end]
            start.handle = outermost.register_forward_pre_hook(start, prepend=True)
            end.handle = outermost.register_forward_hook(end, always_call=True)
            hide_hooks(outermost)
        if self.taps is not None:
            self.taps.attach()
        self.refresh()

    def disable(self) -> None:
        """Hide calls from the probe; what was compiled keeps its operators."""
        with HeldInterrupts():
            self.enabled = False
            for site in self.sites.values():
                site.enabled = False
                if not site.compiled:
                    site.detach()
            self.refresh()
            if self.taps is not None:
                self.taps.detach()
            if not any(boundary.compiled for boundary in self._boundaries):
                self._detach_boundaries()

    def silence(self) -> None:
        """Hide calls from the probe for good, and leave the hooks on the modules, which is fast."""
        self.enabled, self.guard = False, _ignore
        self.refresh()

    def close(self) -> None:
        """Remove all hooks."""
        with HeldInterrupts():
            self.uncalled_modules.warn_on_close()
            self.disable()
            for site in self.sites.values():
                site.detach()
            if self.taps is not None:
                self.taps.detach(permanently=True)
            self._detach_boundaries()

    def __enter__(self) -> Probe:
        return self.probe

    def __exit__(self, *exc: object) -> None:
        if self.probe.attachment is self:
            self.probe.detach()
        else:
            self.close()

    def call_directly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the probe: the guard where there is no manager."""
        try:
            return function(*args)
        except RandomNumberError as error:
            log.warning("The probe '%s' is DISABLED. %s", self.probe.probe_name, error)
            self.disable()
            return None

    def refresh(self) -> None:
        """Update the flag that compiled edits read."""
        is_active = self.enabled and self.probe.is_active
        if is_active != bool(self.flag):  # PyTorch raises if it changes before the backward
            with torch._C._DisableFuncTorch():
                self.flag.fill_(is_active)

    def must_stand_aside(self, name: str) -> bool:
        """Return whether a call is hidden from the probe: it is within a functional transform."""
        if self.probe.edits:
            return False
        if not self._warned_transform:
            self._warned_transform = True
            log.warning(
                "The probe '%s' does not see the calls of modules within functional transforms "
                "(torch.func.vmap, grad, jvp …), such as that of '%s'. It sees all others.",
                self.probe.probe_name,
                name,
            )
        return True

    def _detach_boundaries(self) -> None:
        for boundary in self._boundaries:
            boundary.detach()
        if self._boundaries and (outermost := self._outermost()) is not None:
            unhide_hooks(outermost)
        self._boundaries = []
        self.local = ThreadLocal()  # the end of a forward that runs now will not be seen

    def _outermost(self) -> torch.nn.Module | None:
        """Return the module whose calls start and end a forward."""
        if self.root is not None or len(self.sites) != 1:
            return self.root
        return next(iter(self.sites.values())).module

    def _start(self, gradients: bool | None) -> None:
        if is_recomputing() or (_in_transform() and not self.probe.edits):
            return
        state = self.local.state
        # PyTorch skips the hook at the end after a KeyboardInterrupt, or an error in compilation.
        # So a depth above 0 may be left over, and only the Python stack can tell.
        if state.depth and running_modules().count(id(self._outermost())) > 1:
            state.depth += 1
            return
        state.depth = 1
        state.forward = next(self._forward_numbers)
        state.counts = {}
        state.calls.clear()
        state.gradients = self.context is None or (
            has_gradients() if gradients is None else gradients
        )
        state.error = sys.exception()  # a forward may run while an error is being handled
        if self.taps is not None:
            self.taps.enter()
        if self.enabled and self.probe.wants_forward_start:
            self.guard(_check_observer(self.probe, "forward_start"))

    def _end(self, gradients: bool | None) -> None:
        state = self.local.state
        if is_recomputing() or not state.depth or (_in_transform() and not self.probe.edits):
            return
        try:
            if state.depth == 1:
                self._end_outermost(failed=sys.exception() is not state.error)
        finally:
            state.depth -= 1

    def _end_outermost(self, *, failed: bool) -> None:
        self.local.state.error = None
        if self.taps is not None:
            self.taps.leave()
        if failed or not self.enabled:
            return
        self.uncalled_modules.warn_after_forward()
        if self.probe.wants_forward_end:
            self.guard(_check_observer(self.probe, "forward_end"))

    @property
    def is_training(self) -> bool:
        """Whether what runs now in this thread is training, so with gradients.

        Within the model's outermost call this is what it was when the call began.
        """
        state = self.local.state
        return state.gradients if state.depth else is_recomputing() or has_gradients()

    @property
    def forward_number(self) -> int | None:
        """The number of the forward that runs in this thread, from 1; None if there is none."""
        state = self.local.state
        return state.forward if state.depth else None

    @property
    def uncalled(self) -> list[str]:
        """The modules and taps that no call was seen of."""
        names = self.uncalled_modules.names()
        return names + (self.taps.unmatched if self.taps is not None else [])

    def next_index(self, name: str) -> int:
        """Return how many calls of this name have ended in the outermost call, in this thread."""
        state, context = self.local.state, self.context
        if not state.depth:
            if self.root is None or context is None:
                return 0
            if state.step != context.step:
                state.step, state.counts = context.step, {}
        return state.counts.get(name, 0)

    def count(self, name: str) -> int:
        """Return `next_index` and count one more."""
        index = self.next_index(name)
        self.local.state.counts[name] = index + 1
        return index

    @property
    def running_calls(self) -> list[Call]:
        """The calls that run now in this thread and whose start the probe saw, outermost first."""
        return [call for call, _ in self.local.state.calls]

    def is_alone(self, module: torch.nn.Module | None) -> bool:
        """Return whether the running call of a module is a forward of its own, outside of training.

        It is where it runs neither within the model's own call nor within another one that is seen.
        """
        if self.local.state.depth or self.context is not None:
            return False
        running = running_modules()
        seen = {id(site.module) for site in self.sites.values()} - {id(module)}
        return running.count(id(module)) <= 1 and seen.isdisjoint(running)

    def end_alone(self, module: torch.nn.Module | None) -> None:
        """Handle the end of a call outside of the model's own call."""
        if self.enabled and self.probe.wants_forward_end and self.is_alone(module):
            self.guard(_check_observer(self.probe, "forward_end"))


@dataclass(eq=False, weakref_slot=True, slots=True)
class Site:
    """One module, or one tap, that a probe is attached to."""

    attachment: Attachment
    name: str
    module: torch.nn.Module | None
    enabled: bool = False
    was_called: bool = False
    compiled: bool = False
    paired: bool = False  # whether `before` sees the calls, too
    place: int = 0  # among the hooks of its module: the key of its first hook, 0 before that
    handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])

    def attach(self) -> None:
        """Register hooks on the module."""
        register_receiver(self)
        module, probe = self.module, self.attachment.probe
        assert module is not None
        self.paired = probe.wants_before
        if probe.wants_before or probe.wants_input:
            callback = ModuleCallback(self, before=True)
            self.handles.append(module.register_forward_pre_hook(callback, with_kwargs=True))
        callback = ModuleCallback(self, before=False)
        handle = module.register_forward_hook(callback, with_kwargs=True, always_call=self.paired)
        self.handles.append(handle)
        hide_hooks(module)
        if self.place:
            arrange_sites([self])
        else:
            self.place = handle.id

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        if self.module is not None:
            unhide_hooks(self.module)
        self.handles = []
        unregister_receiver(self)

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the start of a call."""
        recomputed = _graph_task_id() != -1
        attachment = self.attachment
        if _in_transform() and attachment.must_stand_aside(self.name):
            return None
        probe = attachment.probe
        if recomputed and not (probe.edits or probe.wants_recomputed):
            return None
        name, state = self.name, attachment.local.state
        index = 0 if recomputed else attachment.next_index(name)
        # A copy: the next hook may change the keyword arguments in place.
        call = self._make_call(args, dict(kwargs) if kwargs else {}, index, recomputed)
        state.calls.append((call, sys.exception()))
        returned = attachment.guard(attachment.before, call)
        return None if returned is None else self._check_returned(returned)

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Handle the end of a call; in a `paired` one also when the module has raised."""
        recomputed = _graph_task_id() != -1
        attachment = self.attachment
        if _in_transform() and attachment.must_stand_aside(self.name):
            self.was_called = True
            return None
        probe = attachment.probe
        if recomputed and not (probe.edits or probe.wants_recomputed):
            return None
        name, state = self.name, attachment.local.state
        call = None
        if self.paired:
            call, failed = state.pop(name, output)
            if failed:
                if call is not None:
                    probe.interrupted(call)
                return None
        alone = not state.depth
        if recomputed:
            index = 0
        elif alone:
            index = attachment.count(name)
        else:  # `count`, without a call
            index = state.counts.get(name, 0)
            state.counts[name] = index + 1
        self.was_called = True
        if call is None:
            call = self._make_call(args, kwargs, index, recomputed)
        else:
            if args is not call.args or ((kwargs or call.kwargs) and _differ(kwargs, call.kwargs)):
                call.input_replaced = True
            call.args, call.kwargs, call.index = args, kwargs, index
        call.output = output
        returned = attachment.guard(attachment.after, call)
        if alone and not recomputed:
            attachment.end_alone(self.module)
        return None if returned is None else self._check_returned(returned)

    def before_compiled(self, tensors: list[torch.Tensor]) -> None:
        """Handle the operator before the module having run, in a compiled graph."""
        if is_recomputing() or not self.enabled:
            return
        attachment, probe = self.attachment, self.attachment.probe
        index = attachment.next_index(self.name)
        call = self._make_call(tuple(tensors), {}, index, compiled=True)
        attachment.local.state.calls.append((call, sys.exception()))
        if probe.wants_before:
            self._check_not_returned(attachment.guard(attachment.before, call))

    def after_compiled(self, tensors: list[torch.Tensor], gradients: int) -> None:
        """Handle the operator after the module having run."""
        if is_recomputing():
            return
        self.was_called = self.compiled = True
        attachment = self.attachment
        probe = attachment.probe
        call, _ = attachment.local.state.pop(self.name, tensors)
        if not self.enabled or (probe.edits and probe.compiled_edit(self.name) is not None):
            return
        index = attachment.count(self.name)
        if call is None or not call.compiled:  # its start was not compiled with it
            call = self._make_call((), {}, index, compiled=True)
        call.index, call.output = index, tensors[0] if len(tensors) == 1 else tuple(tensors)
        self._check_not_returned(attachment.guard(attachment.after, call))
        if not attachment.local.state.depth:
            attachment.end_alone(self.module)

    def _make_call(
        self, args: Any, kwargs: Any, index: int, recomputed: bool = False, compiled: bool = False
    ) -> Call:
        call = Call(self.name, self.module, args, kwargs, None, index, recomputed, compiled)
        if (context := self.attachment.context) is not None:
            call.step, call.epoch = context.step, context.epoch
        return call

    def _check_not_returned(self, returned: Any) -> None:
        if self._check_returned(returned) is not None:
            raise ProbeError(
                f"The probe '{self.attachment.probe.probe_name}' returned a value for "
                f"'{self.name}', which is compiled: an edit has to be compiled with it. Implement "
                "its compiled_edit()."
            )

    def _check_returned(self, returned: Any) -> Any:
        """Return what the probe returned; raise if it may not return a value."""
        if returned is not None and not self.attachment.probe.edits:
            raise ProbeError(
                f"The probe '{self.attachment.probe.probe_name}' returned a value for "
                f"'{self.name}', but it only observes. To change an output, use an edit, with "
                "enable_intervention=True."
            )
        return returned


def _ignore(function: Callable[..., Any], *args: Any) -> None:
    """Do not call a method of a probe."""


def _differ(kwargs: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    names = kwargs.keys()
    return names != others.keys() or any(kwargs[name] is not others[name] for name in names)


def _check_observer(probe: Probe, name: str) -> Callable[..., Any]:
    """Return a probe's method that raises if it changes tensors or uses global random numbers."""
    method: Callable[..., Any] = getattr(probe, name)
    if probe.edits or type(probe).__module__.startswith("hookline."):
        return method

    @wraps(method)
    def observe(*calls: Call) -> Any:
        value = [(call.args, call.kwargs, call.output) for call in calls]
        subject = f"the input or output of '{calls[0].name}'" if calls else "nothing"
        returned: list[Any] = []
        Observation(value, subject).carry(probe, lambda: returned.append(method(*calls)), (), {})
        return returned[0]

    return observe
