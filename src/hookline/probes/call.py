"""A call of a module, on its way from PyTorch to the probe.

PyTorch calls a `ModuleCallback` before or after a module. Its `Site`, what a probe
is attached to, makes a `Call` and passes it to the probe. Dynamo traces callbacks: in a compiled
graph each becomes the operator of `compiled.py`, which looks up its receiver by a number. A copy or
a pickle of a model gets a function that does nothing instead.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from hookline.errors import ProbeError
from hookline.probes import compiled
from hookline.tensors.hidden_hooks import hide_hooks, unhide_hooks

if TYPE_CHECKING:
    from hookline.probes.attachment import Attachment

_graph_task_id = torch._C._current_graph_task_id  # `is_recomputing`, for where every µs counts
_in_transform = torch._C._are_functorch_transforms_active


# -- the Python stack ------------------------------------------------------------------------------


def is_recomputing() -> bool:
    """Return whether activation checkpointing is running the forward again, within backward."""
    return torch._C._current_graph_task_id() != -1


def running_modules() -> list[int]:
    """Return the `id` of each module whose call runs in this thread, innermost first.

    Modules that were compiled into one graph have no calls on the Python stack.
    """
    frame: FrameType | None = sys._getframe(1)
    modules: list[int] = []
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            modules.append(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return modules


def has_gradients() -> bool:
    """Return whether a forward that runs now can be differentiated, also in a reentrant segment.

    Reentrant checkpointing runs the first pass of a segment without gradients, and a compiled graph
    runs without them, too: both within the `forward(ctx, …)` of an autograd function.
    """
    if torch.is_grad_enabled():
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_method = code.co_name == "forward" and code.co_varnames[:1] == ("ctx",)
        if is_method and isinstance(frame.f_locals.get("ctx"), torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back
    return False


# -- calls and where they come from ----------------------------------------------------------------


@dataclass(slots=True)
class Call:
    """One call of a module, or one occurrence of a named value.

    A probe with `wants_before` gets the same object before and after the module runs; `output` is
    None before. In a compiled model `args` and `output` are flat tuples of the tensors.
    """

    name: str
    module: torch.nn.Module | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    index: int
    recomputed: bool = False
    compiled: bool = False
    step: int | None = None
    epoch: int | None = None
    saved: Any = None
    """For the probe: what it stores in `before` to use in `after`."""
    input_replaced: bool = False
    """In `after`: whether another hook has replaced the arguments since `before`."""


@dataclass(slots=True, eq=False)
class ThreadState:
    """The forward that runs in a thread."""

    depth: int = 0  # of calls of the model: 2 if it has called itself
    forward: int = 0  # its number, from 1
    gradients: bool = True  # whether they were enabled when it began
    error: BaseException | None = None  # the one that was being handled when it began
    step: int | None = None  # the one that is counted in where the model's own call is not seen
    counts: dict[str, int] = field(default_factory=dict[str, int])
    calls: list[tuple[Call, BaseException | None]] = field(default_factory=list[Any])
    """The calls that run, the innermost last, each with the error being handled at its start."""

    def pop(self, name: str, output: Any) -> tuple[Call | None, bool]:
        """Return the innermost running call of a name, if its start was seen, and if it failed."""
        calls = self.calls
        while calls:
            call, error = calls.pop()  # those within it were interrupted
            if call.name == name:
                return call, sys.exception() is not error
        return None, output is None and sys.exception() is not None


class ThreadLocal(threading.local):
    """The state of each thread, looked up once per hook: a thread-local attribute is slow."""

    def __init__(self) -> None:
        self.state = ThreadState()


@dataclass(eq=False, weakref_slot=True, slots=True)
class Site:
    """One module, or one tap, that a probe is attached to."""

    attachment: Attachment
    name: str
    module: torch.nn.Module | None
    was_called: bool = False
    compiled: bool = False
    paired: bool = False  # whether `before` sees the calls, too
    handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])

    def attach(self) -> None:
        """Register hooks on the module."""
        _register_receiver(self)
        module, probe = self.module, self.attachment.probe
        assert module is not None
        self.paired = probe.wants_before
        if probe.wants_before or probe.wants_input:
            callback = ModuleCallback(self, before=True)
            self.handles.append(module.register_forward_pre_hook(callback, with_kwargs=True))
        callback = ModuleCallback(self, before=False)
        self.handles.append(
            module.register_forward_hook(callback, with_kwargs=True, always_call=self.paired)
        )
        hide_hooks(module)

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        if self.module is not None:
            unhide_hooks(self.module)
        self.handles = []
        _unregister_receiver(self)

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the start of a call."""
        recomputed = _graph_task_id() != -1
        attachment = self.attachment
        if _in_transform() and attachment.must_stand_aside(self.name):
            return None
        if recomputed and not attachment.probe.edits:
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
        if recomputed and not attachment.probe.edits:
            return None
        name, state = self.name, attachment.local.state
        call = None
        if self.paired:
            call, failed = state.pop(name, output)
            if failed:
                return None
        if recomputed:
            index = 0
        elif not state.depth:
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
        return None if returned is None else self._check_returned(returned)

    def before_compiled(self, tensors: list[torch.Tensor]) -> None:
        """Handle the operator before the module having run, in a compiled graph."""
        attachment, probe = self.attachment, self.attachment.probe
        if is_recomputing() or not attachment.enabled:
            return
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
        is_edited = probe.edits and self.module is not None  # an edit of a tap is not compiled
        if not attachment.enabled or (is_edited and probe.compiled_edit(self.name) is not None):
            return
        index = attachment.count(self.name)
        if call is None or not call.compiled:  # its start was not compiled with it
            call = self._make_call((), {}, index, compiled=True)
        call.index, call.output = index, tensors[0] if len(tensors) == 1 else tuple(tensors)
        self._check_not_returned(attachment.guard(attachment.after, call))

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
                f"'{self.name}', which is compiled. An edit of a module has to be compiled with "
                "it: implement its compiled_edit(). An edit of a tap needs a model that is not."
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


def _differ(kwargs: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    names = kwargs.keys()
    return names != others.keys() or any(kwargs[name] is not others[name] for name in names)


# -- PyTorch's forward hooks -----------------------------------------------------------------------

_RECEIVERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The objects that operators in compiled graphs notify, by the number that the operator has."""


def _register_receiver(receiver: Any) -> torch.Tensor:
    """Have `receiver.after_compiled` called by the operator; return the number to give it."""
    _RECEIVERS[id(receiver)] = receiver
    return torch.tensor(id(receiver), dtype=torch.int64, device="cpu")


def _unregister_receiver(receiver: Any) -> None:
    """Have the operators that were compiled for a receiver do nothing."""
    _RECEIVERS.pop(id(receiver), None)


def _notify_receiver(number: int, tensors: list[torch.Tensor], gradients: int) -> None:
    receiver = _RECEIVERS.get(number)
    if receiver is not None:
        receiver.after_compiled(tensors, gradients)


compiled.listeners.append(_notify_receiver)


def _do_nothing(*_: Any) -> None:
    """Take a callback's place in a copy of the model."""


def _get_do_nothing() -> Any:
    return _do_nothing


class _NotCopied:
    """A callback that copies and pickles of a model do not have; a copy of it does nothing."""

    is_hidden = True

    def __reduce__(self) -> Any:
        return _get_do_nothing, ()


class ModuleCallback(_NotCopied):
    """The forward pre-hook or forward hook of one module."""

    def __init__(self, site: Site, *, before: bool) -> None:
        probe = site.attachment.probe
        self.site = site
        self._before = before
        self._number = _register_receiver(self if before else site)
        self._wants_input = probe.wants_input
        self._wants_before = probe.wants_before
        self._edits_input = probe.edits_input
        self._edit = probe.compiled_edit(site.name)
        self._is_active = site.attachment.flag

    def __call__(self, module: torch.nn.Module, args: Any, *more: Any) -> Any:
        """Pass a call on to the site, or be traced."""
        if len(more) < (1 if self._before else 2):
            # Another thread is registering or removing this hook: PyTorch keeps in a second place
            # that it takes keyword arguments, and sets that a little later.
            return None
        kwargs, output = more[0], more[-1]
        if is_compiling():
            return self._trace_before(args, kwargs) if self._before else self._trace_after(output)
        site = self.site
        if not site.attachment.enabled:  # hooks that were compiled stay registered
            return None
        if self._before:
            return site.before(args, kwargs) if self._wants_before else None
        return site.after(args, kwargs, output)

    def _trace_before(self, args: Any, kwargs: Any) -> Any:
        if self._wants_input:
            compiled.observe(compiled.find_tensors((args, kwargs)), self._number)
        return self._trace_edit((args, kwargs)) if self._edits_input else None

    def _trace_after(self, output: Any) -> Any:
        if self._edit is None:
            compiled.observe(compiled.find_tensors(output), self._number)
            return None
        compiled.observe([], self._number)
        return None if self._edits_input else self._trace_edit(output)

    def _trace_edit(self, value: Any) -> Any:
        if self._edit is None:
            return None
        tensors = compiled.find_tensors(value)
        # Without a tensor in the value the edit raises its own error.
        flag = self._is_active.to(tensors[0].device) if tensors else self._is_active
        return self._edit(value, flag)

    def after_compiled(self, tensors: list[torch.Tensor], gradients: int) -> None:
        """Handle the operator before a module having run."""
        self.site.before_compiled(tensors)


class ForwardCallback(_NotCopied):
    """The hook at the start or the end of the model's outermost call.

    `call` is called with whether gradients are enabled; None in eager models, where one can look.
    """

    def __init__(self, call: Callable[[bool | None], None]) -> None:
        self._call = call
        self._number = _register_receiver(self)
        self.compiled = False
        self.handle: RemovableHandle | None = None

    def __call__(self, module: torch.nn.Module, args: Any, output: Any = None) -> None:
        """Pass a call of the model on, or be traced."""
        if is_compiling():
            # Gradients are off when the operator runs: autograd sees the graph as one function.
            compiled.observe([], self._number, int(torch.is_grad_enabled()))
        else:
            self._call(None)

    def after_compiled(self, tensors: list[torch.Tensor], gradients: int) -> None:
        """Handle the operator having run, in a graph compiled with or without gradients."""
        self.compiled = True
        self._call(bool(gradients))

    def detach(self) -> None:
        """Remove the hook."""
        if self.handle is not None:
            self.handle.remove()
        _unregister_receiver(self)
