"""How a probe gets to see the calls of modules, in eager and in compiled models.

An `Attachment` puts PyTorch's own hooks on the modules of one probe, and takes exactly these off.
For each call it makes a `Call` and hands it to the probe: before the module runs, if the probe
wants that, and after it. It knows what is easily got wrong:

- A recomputation of activation checkpointing is no new call. Observers do not see it; an edit is
  applied again, or gradients would be silently wrong.
- In a compiled model the hook is traced into an operator that looks at a switch, so that toggling
  does not compile anything again. In an eager model a probe that is off is taken off.
- A copy or a pickle of the model has no probe.
- Calls are counted within the outermost call of the model, in each thread for itself. Where the
  model's own call is not seen, since another of its methods is called, they are counted within the
  step, or are each a forward of their own.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import CodeType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from hookline.errors import ProbeError, listed
from hookline.probes import compiled
from hookline.probes.recomputation import calls_running, is_recomputing, is_within
from hookline.probes.segments import has_gradients
from hookline.probes.taps import Taps

if TYPE_CHECKING:
    from hookline.probes.probe import Probe

__all__ = ["Attachment", "Call", "is_recomputing"]

log = logging.getLogger("hookline")

_graph_task = torch._C._current_graph_task_id
_ENTRIES = "_debug_get_cache_entry_list"


@dataclass(slots=True)
class Call:
    """One call of a module, or one passage of a named value.

    `output` is None before the module runs. In a compiled model the tensors of what came in and
    went out are there as flat tuples, the structure around them is not.
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

    def came_with(self, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any]) -> bool:
        """Whether it was called with these, and not with what another hook put in their place."""
        if args is not self.args or kwargs.keys() != self.kwargs.keys():
            return False
        return all(value is self.kwargs[name] for name, value in kwargs.items())


class Attachment:
    """One probe on some modules.

    Args:
        probe: whom to tell.
        sites: the modules, by name.
        root: the model whose outermost call is one forward; None: each module is its own.
        context: has `step` and `epoch`, where training goes on; None elsewhere.
        guard: calls the probe; a trainer's isolates and counts. By default it is just called.
        taps: the named values of the model's code that it is to see, too: names or globs.
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
        self.guard: Callable[..., Any] = guard or _just_call
        self.enabled = False
        self.flag = torch.zeros((), dtype=torch.bool, device="cpu")  # on, for compiled edits
        self.taps = Taps(self, taps, lambda name: Site(self, name, None)) if taps else None
        self.here = Here()
        self._forward_numbers = count(1)
        self._ends: list[_End] = []
        self._told = False

    # -- on and off -------------------------------------------------------------------------------

    def on(self) -> None:
        """Let the probe see calls from now on."""
        if self.enabled:
            return
        self.enabled = True
        for site in self.sites.values():
            site.on = True
            if not site.handles:
                site.attach(before=self.probe.wants_before or self.probe.wants_input)
        outermost = self._outermost()
        if outermost is not None and not self._ends:
            begin, end = _End(self._begin), _End(self._end)
            begin.handle = outermost.register_forward_pre_hook(begin, prepend=True)
            end.handle = outermost.register_forward_hook(end, always_call=True)
            self._ends = [begin, end]
        if self.taps is not None:
            self.taps.attach()
        self.refresh()

    def off(self) -> None:
        """Let it see none; what was compiled keeps an operator that looks at a switch."""
        self.enabled = False
        for site in self.sites.values():
            site.on = False
            if not site.compiled:
                site.detach()
        self.refresh()
        if self.taps is not None:
            self.taps.detach()
        if not any(end.compiled for end in self._ends):
            self._detach_root()

    def close(self) -> None:
        """Take everything off that was put on."""
        root = self.root
        if self.enabled and self.context is None and root is not None and root not in _TOLD:
            self._tell_uncalled(self._silent_modules())
        self.enabled = False
        for site in self.sites.values():
            site.on = False
            site.detach()
        self.refresh()
        if self.taps is not None:
            self.taps.detach(for_good=True)
        self._detach_root()

    def refresh(self) -> None:
        """Tell compiled edits whether they are on."""
        on = self.enabled and self.probe.acts
        if on != bool(self.flag):  # a change while a backward is still to come is PyTorch's error
            self.flag.fill_(on)

    def _detach_root(self) -> None:
        for end in self._ends:
            end.detach()
        self._ends = []
        self.here = Here()  # the end of a forward that runs now will not be seen

    # -- the outermost call -----------------------------------------------------------------------

    def _outermost(self) -> torch.nn.Module | None:
        """The module whose calls begin and end a forward, if anybody wants to know."""
        if self.root is not None or len(self.sites) != 1:
            return self.root
        if not (self.probe.wants_began or self.probe.wants_ended):
            return None
        return next(iter(self.sites.values())).module

    def _begin(self, gradients: bool | None) -> None:
        if is_recomputing():
            return
        here = self.here
        if here.depth and calls_running(self._outermost()) > 1:  # else its end was not seen
            here.depth += 1
            return
        here.depth = 1
        here.forward = next(self._forward_numbers)
        here.by_name = {}
        here.came_in = {}
        here.trains = self.context is None or (has_gradients() if gradients is None else gradients)
        here.raised = sys.exc_info()[1]  # a forward may be run while an error is handled
        if self.taps is not None:
            self.taps.enter()
        if self.enabled and self.probe.wants_began:
            self.guard(self.probe.began)

    def _end(self, gradients: bool | None) -> None:
        here = self.here
        if is_recomputing() or not here.depth:
            return
        try:
            if here.depth == 1:
                self._end_outermost(failed=sys.exc_info()[1] is not here.raised)
        finally:
            here.depth -= 1

    def _end_outermost(self, *, failed: bool) -> None:
        self.here.raised = None
        if self.taps is not None:
            self.taps.leave()
        if failed or not self.enabled:
            return
        if not self._told:
            self._told = True
            self._tell_silent()
        if self.probe.wants_ended:
            self.guard(self.probe.ended)

    @property
    def trains(self) -> bool:
        """Whether what runs now, in this thread, is training, and not a look without gradients.

        Within the model's outermost call that is as it was when it began.
        """
        here = self.here
        return here.trains if here.depth else is_recomputing() or has_gradients()

    @property
    def forward_number(self) -> int | None:
        """The number of the forward that runs in this thread, from 1; None if there is none."""
        return self.here.forward if self.here.depth else None

    def _silent_modules(self) -> list[str]:
        sites = self.sites.values()
        silent = [site for site in sites if not site.fired]
        # A list of modules has no forward. Among others it was not meant, and is never called.
        own = [site for site in silent if _has_forward(site.module)]
        return [site.name for site in (silent if len(silent) == len(sites) else own)]

    def _tell_silent(self) -> None:
        silent = self._silent_modules()
        if silent:
            log.warning(
                "The probe '%s' saw no call of %s in the model's first forward. %s",
                self.probe.probe_name,
                listed(silent),
                self.likely_cause(silent),
            )
        if self.taps is not None and self.taps.silent:
            log.warning(
                "The probe '%s' saw no value named %s in the model's first forward. %s",
                self.probe.probe_name,
                listed(self.taps.silent),
                self.taps.hint(),
            )

    def end_step(self) -> None:
        """A step of training is over: say what was not seen, if the model's own call was not."""
        self._tell_uncalled(self.silent)

    def _tell_uncalled(self, silent: list[str]) -> None:
        if self._told or not silent:
            return
        self._told = True
        if self.root is not None:
            _TOLD.add(self.root)
        log.warning(
            "The probe '%s' saw nothing of %s, nor a call of the model itself. %s",
            self.probe.probe_name,
            listed(silent),
            self.likely_cause(silent, called=False),
        )

    def likely_cause(self, silent: list[str], *, called: bool = True) -> str:
        """Say why modules were not seen; `called`: whether the model's own call was."""
        root = self.root
        if root is not None and (
            _is_compiled(root)
            or _has_compiled_code(root)
            or (not called and _is_compiled_by_wrapping(root))
        ):
            return (
                "The model was compiled, and called, before the probe was attached: attach first, "
                "then compile; or call torch.compiler.reset() now."
            )
        if self._is_within_compiled(silent):
            return "It was compiled before the probe was attached: attach first, then compile."
        if root is not None and not called:
            return (
                "Likely its `.forward()`, or another method, was called directly, and PyTorch "
                "shows nothing of that: call modules as `model(x)`."
            )
        return (
            "Likely it was not called as a module: a fused path went around it (as in an attention "
            "layer in eval mode), its `.forward()` was called directly, or this forward did not "
            "need it."
        )

    def _is_within_compiled(self, silent: list[str]) -> bool:
        hidden = {id(self.sites[name].module) for name in silent if name in self.sites}
        around = [site.module for site in self.sites.values() if site.module is not None]
        return any(
            _is_compiled(module) and any(id(inner) in hidden for inner in module.modules())
            for module in (around if self.root is None else self.root.modules())
        )

    # -- counting ---------------------------------------------------------------------------------

    def upcoming(self, name: str) -> int:
        """What `count` will say next."""
        here, context = self.here, self.context
        if not here.depth:
            if self.root is None or context is None:
                return 0
            if here.step != context.step:
                here.step, here.by_name = context.step, {}
        return here.by_name.get(name, 0)

    def count(self, name: str) -> int:
        """Which call of this name it is within the outermost call, in this thread."""
        index = self.upcoming(name)
        self.here.by_name[name] = index + 1
        return index

    def is_alone(self, module: torch.nn.Module | None) -> bool:
        """Whether a call of a module is a forward of its own, outside of training.

        So it is where it runs neither within the model's own call nor within another that is seen.
        """
        if self.here.depth or self.context is not None:
            return False
        return not is_within(module, [site.module for site in self.sites.values()])

    def ended_alone(self, module: torch.nn.Module | None) -> None:
        """A call outside of the model's own is over."""
        if self.enabled and self.probe.wants_ended and self.is_alone(module):
            self.guard(self.probe.ended)

    @property
    def silent(self) -> list[str]:
        """The modules and taps that have not been seen to be called."""
        return self._silent_modules() + (self.taps.silent if self.taps is not None else [])


class Here(threading.local):
    """The forward that runs in this thread."""

    def __init__(self) -> None:
        self.depth = 0  # of calls of the model: 2 where it has called itself
        self.forward = 0  # its number
        self.trains = True  # whether it began with gradients
        self.raised: BaseException | None = None  # the error that was handled when it began
        self.step: int | None = None  # the step that is counted in where no such call is seen
        self.by_name: dict[str, int] = {}
        # In compiled models, into the calls that run, by name: the innermost last.
        self.came_in: dict[str, list[tuple[Any, ...]]] = {}


_TOLD: WeakSet[torch.nn.Module] = WeakSet()
"""Models of which it was said that their calls are not seen: perhaps nobody has called them."""

_BY_NUMBER: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Who is told by the operators of compiled graphs, which know a number only."""


@dataclass(eq=False, weakref_slot=True, slots=True)
class Site:
    """One module that a probe is on."""

    attachment: Attachment
    name: str
    module: torch.nn.Module | None
    on: bool = False
    fired: bool = False
    compiled: bool = False
    handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])

    def attach(self, *, before: bool) -> None:
        """Put hooks on the module."""
        _BY_NUMBER[id(self)] = self
        module = self.module
        assert module is not None
        if before:
            tap = _ModuleCallback(self, before=True)
            self.handles.append(module.register_forward_pre_hook(tap, with_kwargs=True))
        tap = _ModuleCallback(self, before=False)
        self.handles.append(module.register_forward_hook(tap, with_kwargs=True))

    def detach(self) -> None:
        """Take them off."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        _BY_NUMBER.pop(id(self), None)

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module is about to run."""
        again = _graph_task() != -1  # is_recomputing(), but this is called all the time
        attachment = self.attachment
        probe = attachment.probe
        if again and not (probe.edits or probe.wants_recomputed):
            return None
        index = 0 if again else attachment.upcoming(self.name)
        call = Call(self.name, self.module, args, kwargs, None, index, again)
        if (context := attachment.context) is not None:
            call.step, call.epoch = context.step, context.epoch
        returned = attachment.guard(probe.before, call)
        return None if returned is None else self._checked(returned)

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The module has run."""
        again = _graph_task() != -1  # is_recomputing(), but this is called all the time
        attachment = self.attachment
        probe = attachment.probe
        if again and not (probe.edits or probe.wants_recomputed):
            return None
        here = attachment.here
        alone = not here.depth
        if again:
            index = 0
        elif alone:
            index = attachment.count(self.name)
        else:  # the same, without a call
            index = here.by_name.get(self.name, 0)
            here.by_name[self.name] = index + 1
        self.fired = True
        call = Call(self.name, self.module, args, kwargs, output, index, again)
        if (context := attachment.context) is not None:
            call.step, call.epoch = context.step, context.epoch
        returned = attachment.guard(probe.after, call)
        if alone and not again:
            attachment.ended_alone(self.module)
        return None if returned is None else self._checked(returned)

    def before_compiled(self, tensors: list[torch.Tensor]) -> None:
        """The operator before the module, in a compiled graph, has run."""
        if is_recomputing() or not self.on:
            return
        attachment, probe = self.attachment, self.attachment.probe
        call = self._compiled_call(tuple(tensors), None, attachment.upcoming(self.name))
        if probe.wants_input:
            attachment.here.came_in.setdefault(self.name, []).append(call.args)
        if probe.wants_before:
            attachment.guard(probe.before, call)

    def after_compiled(self, tensors: list[torch.Tensor], gradients: int) -> None:
        """The operator after the module has run; if inputs are wanted, another before it has."""
        if is_recomputing():
            return
        self.fired = self.compiled = True
        attachment = self.attachment
        probe = attachment.probe
        waiting = attachment.here.came_in.get(self.name)
        args = waiting.pop() if waiting else ()
        if not self.on or (probe.edits and probe.compiled_edit(self.name) is not None):
            return
        output = tensors[0] if len(tensors) == 1 else tuple(tensors)
        call = self._compiled_call(args, output, attachment.count(self.name))
        if self._checked(attachment.guard(attachment.probe.after, call)) is not None:
            raise ProbeError(
                f"The probe '{attachment.probe.probe_name}' returned a value for '{self.name}', "
                "which is compiled: there an edit is compiled, too. Write its compiled_edit()."
            )
        if not attachment.here.depth:
            attachment.ended_alone(self.module)

    def _compiled_call(self, args: tuple[Any, ...], output: Any, index: int) -> Call:
        call = Call(self.name, self.module, args, {}, output, index, compiled=True)
        if (context := self.attachment.context) is not None:
            call.step, call.epoch = context.step, context.epoch
        return call

    def _checked(self, returned: Any) -> Any:
        if returned is not None and not self.attachment.probe.edits:
            raise ProbeError(
                f"The probe '{self.attachment.probe.probe_name}' returned a value for "
                f"'{self.name}', but it only observes. To edit what flows through a module, use an "
                "edit, with enable_intervention=True."
            )
        return returned


class _ModuleCallback:
    """What PyTorch calls. Dynamo traces it: in a compiled graph it becomes an operator."""

    def __init__(self, site: Site, *, before: bool) -> None:
        self._site = site
        self._before = before
        self._number = compiled.numbered(id(self) if before else id(site))
        if before:
            _BY_NUMBER[id(self)] = self
        probe = site.attachment.probe
        self._takes_input = probe.wants_input
        self._tells_before = probe.wants_before
        self._edit = probe.compiled_edit(site.name)
        self._on = site.attachment.flag

    def __call__(self, module: torch.nn.Module, args: Any, *more: Any) -> Any:
        """A module is called, or being compiled."""
        if len(more) < (1 if self._before else 2):
            # Another thread is just putting it on or taking it off: PyTorch keeps in a second place
            # that it takes keyword arguments, and sets that a moment later.
            return None
        kwargs, output = more[0], more[-1]
        if is_compiling():
            if self._before:
                if self._takes_input:
                    compiled.see(compiled.tensors((args, kwargs)), self._number)
                elif self._edit is not None and self._tells_before:
                    compiled.see([], self._number)
                return None
            went_out = compiled.tensors(output)
            if self._edit is not None:  # where it finds no tensor, that is its error
                compiled.see([], self._number)
                on = self._on.to(went_out[0].device) if went_out else self._on
                return self._edit(output, on)
            compiled.see(went_out, self._number)
            return None
        if self._before:
            return self._site.before(args, kwargs) if self._tells_before else None
        return self._site.after(args, kwargs, output)

    def after_compiled(self, tensors: list[torch.Tensor], gradients: int) -> None:
        """The operator before a module has run."""
        self._site.before_compiled(tensors)

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _get_nothing, ()


class _End:
    """The beginning or the end of the model's outermost call."""

    def __init__(self, call: Callable[[bool | None], None]) -> None:
        self._call = call
        self._number = compiled.numbered(id(self))
        self.compiled = False
        self.handle: RemovableHandle | None = None
        _BY_NUMBER[id(self)] = self

    def __call__(self, module: torch.nn.Module, args: Any, output: Any = None) -> None:
        """The model is called, or being compiled."""
        if is_compiling():
            # When it runs, gradients are off: the graph as a whole is what is differentiated.
            compiled.see([], self._number, int(torch.is_grad_enabled()))
        else:
            self._call(None)

    def after_compiled(self, tensors: list[torch.Tensor], gradients: int) -> None:
        """The operator in a compiled graph has run; `gradients` says whether with gradients."""
        self.compiled = True
        self._call(bool(gradients))

    def detach(self) -> None:
        """Take it off."""
        if self.handle is not None:
            self.handle.remove()
        _BY_NUMBER.pop(id(self), None)

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _get_nothing, ()


def _nothing(*_: Any) -> None:
    """Stands where a probe was, in a copy of the model."""


def _get_nothing() -> Any:
    return _nothing


def _has_forward(module: torch.nn.Module | None) -> bool:
    return getattr(type(module), "forward", None) is not torch.nn.Module.forward


def _just_call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _saw(number: int, tensors: list[torch.Tensor], gradients: int) -> None:
    told = _BY_NUMBER.get(number)
    if told is not None:
        told.after_compiled(tensors, gradients)


compiled.tell.append(_saw)


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl") is not None


def _has_compiled_code(module: torch.nn.Module) -> bool:
    """Whether the code of a module's forward was compiled, for this one or another like it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    entries = getattr(dynamo, _ENTRIES, None)
    code = getattr(module.forward, "__code__", None)
    return entries is not None and code is not None and bool(entries(code))


def _is_compiled_by_wrapping(module: torch.nn.Module) -> bool:
    """Whether a model of one of PyTorch's own classes was compiled: dynamo puts a frame around it.

    All such models share that frame, so it may have been another one.
    """
    wrap = getattr(sys.modules.get("torch._dynamo.external_utils"), "wrap_inline", None)
    entries = getattr(sys.modules.get("torch._dynamo.eval_frame"), _ENTRIES, None)
    origin = getattr(type(module).forward, "__module__", None) or ""
    if wrap is None or entries is None or not origin.startswith("torch."):
        return False
    return any(entries(inner) for inner in wrap.__code__.co_consts if isinstance(inner, CodeType))
