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
from functools import wraps
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from hookline.arguments import check_whole_number
from hookline.errors import ConfigError, ProbeError, RandomNumberError, listed
from hookline.interrupts import HeldInterrupts
from hookline.probes.call import (
    Call,
    ForwardCallback,
    Site,
    ThreadLocal,
    has_gradients,
    is_recomputing,
    running_modules,
)
from hookline.probes.taps import Taps
from hookline.tensors.hidden_hooks import hide_hooks, unhide_hooks
from hookline.tensors.observation import Observation

if TYPE_CHECKING:
    from hookline.probes.probe import Probe

log = logging.getLogger("hookline")

_in_transform = torch._C._are_functorch_transforms_active
_WARNED: WeakSet[torch.nn.Module] = WeakSet()  # models that a warning about calls has named

WHY_UNCALLED = (
    "Probably it was not called as a module: its `.forward()` or another method was called "
    "directly, a fused path was used instead (as by an attention layer in eval mode), or the "
    "forward did not need it. Or the model was compiled and called before the probe was attached: "
    "attach first, then compile, or call torch.compiler.reset() now."
)


class Attachment:
    """One probe on some modules, by name.

    `root` is the model whose outermost call is one forward; None if each module is its own. The
    context has `step` and `epoch` in training. `guard` calls the probe's methods; a trainer's also
    isolates and counts failures.
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
        self._call = self.guard  # without a schedule
        self.before, self.after = _check_observer(probe, "before"), _check_observer(probe, "after")
        self._forward_end = _check_observer(probe, "forward_end")
        self.enabled = False
        self.flag = torch.zeros((), dtype=torch.bool, device="cpu")
        """Whether the probe is enabled, for compiled edits."""
        self.taps = Taps(self, taps) if taps else None
        self.local = ThreadLocal()
        self._forward_numbers = count(1)
        self._boundaries: list[ForwardCallback] = []
        self._warned_transform = self._checked_calls = False

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
            if not site.handles:
                site.attach()
        self._attach_boundaries()
        if self.taps is not None:
            self.taps.attach()
        self.refresh()

    def _attach_boundaries(self) -> None:
        outermost = self._outermost()
        if outermost is not None and not self._boundaries:
            start, end = ForwardCallback(self._start), ForwardCallback(self._end)
            self._boundaries = [start, end]
            start.handle = outermost.register_forward_pre_hook(start, prepend=True)
            end.handle = outermost.register_forward_hook(end, always_call=True)
            hide_hooks(outermost)

    def move_last(self, site: Site) -> None:
        """Register the hooks of a site anew, so that they are called after those of others."""
        site.detach()
        site.attach()
        if site.module is self._outermost():  # its call ends after those of the site
            self._detach_boundaries()
            self._attach_boundaries()

    def disable(self) -> None:
        """Hide calls from the probe; what was compiled keeps its operators."""
        with HeldInterrupts():
            self.enabled = False
            for site in self.sites.values():
                if not site.compiled:
                    site.detach()
            self.refresh()
            if self.taps is not None:
                self.taps.detach()
            if not any(boundary.compiled for boundary in self._boundaries):
                self._detach_boundaries()

    def silence(self) -> None:
        """Hide calls from the probe for good, and leave the hooks on the modules, which is fast."""
        self.enabled = False
        self.refresh()

    def close(self) -> None:
        """Remove all hooks."""
        with HeldInterrupts():
            outside = self.enabled and self.context is None and self.sites
            if outside and self.root is not None and self.root not in _WARNED:
                self.check_calls()
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

    def schedule(self, every: int) -> None:
        """Have the probe called only in the forwards N, 2N, 3N …, and outside of any forward."""
        check_whole_number("every", every, 1)
        if self.probe.edits and every > 1:
            raise ConfigError("An edit takes no schedule: attach and detach it instead.")

        def guard(function: Callable[..., Any], *args: Any) -> Any:
            number = self.forward_number
            is_due = number is None or number % every == 0
            return self._call(function, *args) if is_due else None

        self.guard = self._call if every == 1 else guard

    def refresh(self) -> None:
        """Update the flag that compiled edits read."""
        if self.enabled != bool(self.flag):  # PyTorch raises if it changes before the backward
            with torch._C._DisableFuncTorch():
                self.flag.fill_(self.enabled)

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
        if not self._checked_calls:
            self._raise_if_without_effect()
            self.check_calls()
        if self.probe.wants_forward_end:
            self.guard(self._forward_end)

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

    # -- modules that no call was seen of ---------------------------------------------------------

    def _uncalled_modules(self) -> list[str]:
        uncalled = [site for site in self.sites.values() if not site.was_called]
        if len(uncalled) < len(self.sites):
            # A ModuleList has no forward and is never called: it was selected along with others.
            uncalled = [site for site in uncalled if _has_forward(site.module)]
        return [site.name for site in uncalled]

    def _raise_if_without_effect(self) -> None:
        """Raise if this is an edit, and none of its modules and taps was called in the forward.

        A compiled model may just have to be compiled again: that is a warning.
        """
        called = any(site.was_called for site in self.sites.values())
        taps = self.taps
        if not self.probe.edits or called or (taps and len(taps.unmatched) < len(taps.patterns)):
            return
        if type(self.root).__name__ == "OptimizedModule":
            return
        self._checked_calls = True
        hint = WHY_UNCALLED if taps is None else taps.hint()
        raise ProbeError(
            f"The edit '{self.probe.probe_name}' has changed nothing in this forward: no call was "
            f"seen of {listed([*self.sites, *(taps.patterns if taps else ())])}. {hint}"
        )

    def check_calls(self) -> None:
        """Warn, once, about modules and taps that no call was seen of."""
        if self._checked_calls:
            return
        self._checked_calls = True
        template = "The probe '%s' saw no %s %s. %s"
        if uncalled := self._uncalled_modules():
            names = listed(uncalled)
            log.warning(template, self.probe.probe_name, "call of", names, WHY_UNCALLED)
            if self.root is not None:
                _WARNED.add(self.root)
        if self.taps is not None and (unmatched := self.taps.unmatched):
            names = listed(unmatched)
            log.warning(template, self.probe.probe_name, "value named", names, self.taps.hint())


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


def _has_forward(module: torch.nn.Module | None) -> bool:
    return getattr(type(module), "forward", None) is not torch.nn.Module.forward
