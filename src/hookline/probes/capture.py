"""Capture: keeps what flows through modules."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Annotated, Any, ClassVar, overload

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from hookline.errors import ConfigError, ProbeError, listed, nearest
from hookline.hook import Rank
from hookline.options import BuiltIn
from hookline.probes.attachment import Attachment, Call
from hookline.probes.captured_state import CapturedState
from hookline.probes.extractor import By, TensorExtractor
from hookline.probes.gradient_capture import follow
from hookline.probes.lazy_state import Check, LazyState
from hookline.probes.module_selection import Which, aliases, check_model, clean_name
from hookline.probes.probe import Probe
from hookline.probes.recomputation import calls_running
from hookline.probes.segments import note, noted
from hookline.probes.store import Counts, Policy, Store

__all__ = ["Calls", "Capture", "NotCapturedError", "bytes_of"]

log = logging.getLogger("hookline")

_MEMORY_LIMIT_MB = 1024.0


class NotCapturedError(ProbeError, KeyError):
    """Nothing was captured of this name."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class Capture(BuiltIn, Probe):
    """Keeps what goes into modules, comes out of them and flows back.

    `capture["blocks.3.mlp"]` has what was captured of a module: `.output`, `.input`, `.kwargs` and
    `.gradient` are those of its last call, and the calls themselves can be indexed and iterated
    over. `capture.states()` has everything in the order of the calls. Both also after training.

    Tensors are found anywhere in what flows: in tuples, lists, mappings and objects, such as the
    cache of a Hugging Face model, which is copied as it was. What holds tensors and cannot be
    copied, or stands too deep in others, is replaced by a `NotCopied` that names its class.

    Args:
        modules: Which modules: names, globs such as `"blocks.*.mlp"`, types, and so on.
        input: Whether to keep the positional arguments, as they were before the module ran.
        output: Whether to keep what it returned.
        kwargs: Whether to keep the keyword arguments.
        gradient: Whether to keep the gradient of what it returned, of the last backward. It is None
            where there is no backward, in a compiled model, which does not show it, and of a leaf
            that is returned, such as a parameter: that has its own `.grad`.
        device: Where to keep tensors, such as `"cpu"`. By default where they are. Nothing waits for
            a copy from an accelerator until it is read.
        dtype: What floating-point tensors are kept as, such as `"float16"`. By default as they are.
        select: The part of each tensor to keep: an index, such as `0`, `slice(4)` or `":, -1"`, or
            a function that returns a tensor.
        reduce: What to keep of each tensor, or of that part: `"mean"`, `"sum"`, `"std"`, `"norm"`,
            `"max"`, `"min"` or `"abs_max"`, or a function that returns a tensor.
        dim: The dimensions that `reduce` takes together; by default all.
        every: Captures in every so many steps, from the first; outside of training, in every so
            many forwards.
        by: `"copy"`, or `"reference"`: then nothing is copied, and what was changed in place since
            (as by an in-place ReLU) is an error when it is read. A change through `.data` or
            `.numpy()` leaves no trace and is not noticed.
        layer_idx: The layer's number, for the states. By default the first number in the module's
            name, if it has one.
        max_states: How many states to keep, over all modules; by default any number.
        memory_limit_mb: How many megabytes (of 1024² bytes) to keep; None for any number.
        policy: What happens to what does not fit: the oldest is dropped (`"drop_oldest"`), a fair
            sample stays (`"sample"`), the oldest is written to disk (`"spill"`), or it is an error
            (`"error"`).
        folder: Where `"spill"` writes; by default the system's folder for temporary files.
        store: Where states are kept, to share limits with others. It brings its own.
        taps: Which of the values that `hookline.tap` names in the model's code: names or globs.
            Of a value there is an output only.
    """

    cost: ClassVar[str] = (
        "A copy of what is kept, and some microseconds for each call of a module; with `input` or "
        "`kwargs` some more."
    )
    hookline_rank = Rank.MONITOR
    probe_name = "capture"

    def __init__(
        self,
        modules: Which | None = None,
        input: bool = True,
        output: bool = True,
        kwargs: bool = True,
        gradient: bool = False,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        select: Any = None,
        reduce: str | Callable[[Tensor], Tensor] | None = None,
        dim: int | list[int] | tuple[int, ...] | None = None,
        every: PositiveInt = 1,
        by: By = "copy",
        layer_idx: Annotated[int, Field(ge=0)] | None = None,
        max_states: PositiveInt | None = None,
        memory_limit_mb: PositiveFloat | None = _MEMORY_LIMIT_MB,
        policy: Policy = "drop_oldest",
        folder: str | None = None,
        store: Store | None = None,
        taps: str | list[str] | tuple[str, ...] = (),
    ) -> None:
        super().__init__(modules, (taps,) if isinstance(taps, str) else taps)
        if not (input or output or kwargs or gradient):
            raise ConfigError("Capture: nothing is to be kept. Leave one of input, output … on.")
        if by == "reference" and (store.policy if store is not None else policy) == "spill":
            raise ConfigError("Capture: policy='spill' writes copies; use it with by='copy'.")
        self._kept = {"input": input, "output": output, "kwargs": kwargs, "gradient": gradient}
        self.wants_before = self.wants_input = input or kwargs
        self.wants_recomputed = gradient
        self._take = TensorExtractor(self, by, device, dtype, select, reduce, dim)
        self._plain_output = output and self._take.plain
        self._every = every
        self._layer_idx = layer_idx
        self._limits = _limits(max_states, memory_limit_mb, policy, folder, shared=store)
        self._begin(store)

    def _begin(self, store: Store | None) -> None:
        self._store = Store(**self._limits) if store is None else store
        self._key: str | None = None
        self._here = _Here()
        self._forwards: dict[str, count[int]] = {}
        self._layers: dict[str, int | None] = {}
        self._names: dict[
            str, str
        ] = {}  # also those of tied modules, each with the one it is under
        self._said = False

    # -- what happens -----------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module, **options: Any) -> Attachment:
        """Put the probe on a model; it sees calls from now on."""
        check_model(model)
        before = self.attachment
        attachment = super().attach(model, **options)
        if attachment is not before:
            self._learn_names(model, attachment)
        return attachment

    def _learn_names(self, model: torch.nn.Module, attachment: Attachment) -> None:
        self._names.update({name: name for name in attachment.sites})
        for first, others in aliases(model).items():
            chosen = next((name for name in (first, *others) if name in attachment.sites), None)
            if chosen is not None:
                self._names.update(dict.fromkeys((first, *others), chosen))

    def began(self) -> None:
        """A forward begins: forget what a failed one has left."""
        self._here.came_in.clear()

    def before(self, call: Call) -> None:
        """A module is about to run: what comes in is taken now, since it may change it in place."""
        if call.recomputed or not self._due(call, begins=call.index == 0):
            return
        waiting = self._here.came_in.setdefault(call.name, [])
        if waiting and not call.compiled:  # for calls that this one is within, or that have failed
            del waiting[calls_running(call.module) - 1 :]
        waiting.append((call.args, dict(call.kwargs), *self._came_in(call)))

    def after(self, call: Call) -> None:
        """A module has run."""
        if call.recomputed:
            self._repeated(call)
            return
        if self._every != 1 and not self._is_due(call):
            self._follow(call, None, None)  # it counts, for who finds the calls again
            return
        name = call.name
        layer = self._layers[name] if name in self._layers else self._layer_of(name)
        kind = CapturedState if self._take.at_once else LazyState
        state = kind(name, self.probe_name, call.step, call.epoch, call.index, layer)
        if self.wants_input and call.module is not None:
            waiting = self._here.came_in.get(name)
            if waiting and len(waiting) > 1 and not call.compiled:  # there are no calls to count
                del waiting[calls_running(call.module) :]
            args, kwargs, *taken = waiting.pop() if waiting else (None, {})
            # Not the same: another hook has replaced what comes in, after this one has seen it.
            came_in, check = taken if call.came_with(args, kwargs) else self._came_in(call)
            state.input, state.kwargs = came_in
            if check is not None and isinstance(state, LazyState):
                state.checks |= {"input": check, "kwargs": check}
        output = call.output
        if type(output) is Tensor and self._plain_output:  # as most often
            state.output = output.detach().clone()
        elif self._kept["output"]:
            state.output, check = self._take(output, name, copy=call.compiled)
            if check is not None and isinstance(state, LazyState):
                state.checks["output"] = check
        key = self._store.add(self._key or self.key, state)
        if self._kept["gradient"]:
            self._follow(call, key, state)

    def _came_in(self, call: Call) -> tuple[Any, Check | None]:
        args = call.args if self._kept["input"] else None
        kwargs = dict(call.kwargs) if self._kept["kwargs"] else None
        return self._take((args, kwargs), call.name, copy=call.compiled)

    def _is_due(self, call: Call) -> bool:
        """Whether a call that is over is in a step, or a forward, that is captured."""
        told_before = self.wants_before and call.module is not None
        return self._due(call, begins=call.index == 0 and not told_before)

    def _due(self, call: Call, *, begins: bool) -> bool:
        if self._every == 1:
            return True
        if call.step is not None:
            return call.step % self._every == 0
        due = self._here.due
        if begins or call.name not in due:
            number = next(self._forwards.setdefault(call.name, count()))
            due[call.name] = number % self._every == 0
        return due[call.name]

    def _layer_of(self, name: str) -> int | None:
        numbers = (int(part) for part in name.split(".") if part.isdecimal())
        layer = next(numbers, None) if self._layer_idx is None else self._layer_idx
        self._layers[name] = layer
        return layer

    # -- gradients --------------------------------------------------------------------------------

    def _follow(self, call: Call, key: int | None, state: CapturedState | None) -> None:
        """See to it that the gradient gets to its state, once it is there."""
        if not self._kept["gradient"]:
            return
        if call.compiled:
            self._say_once("it does not see gradients in a compiled model: they stay None")
            return
        weak = None if state is None else weakref.ref(state)
        self._wait_for(call, key, weak)

    def _repeated(self, call: Call) -> None:
        found = noted((self, call.name))
        if found is not None:
            self._wait_for(call, *found)

    def _wait_for(self, call: Call, key: int | None, state: Any) -> None:
        if torch.is_grad_enabled():
            if key is not None and self.attachment is not None:
                guard = self.attachment.guard
                follow(call.output, call.name, self._take, self._store, key, state, guard)
        else:
            # The first pass of a segment that is recomputed, or no gradients at all.
            note((self, call.name), (key, state))

    def _say_once(self, what: str) -> None:
        if not self._said:
            self._said = True
            log.warning("The probe '%s': %s.", self.probe_name, what)

    # -- what was captured ------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """Where the states are kept."""
        return self._store

    @property
    def key(self) -> str:
        """The name under which the store has them: the probe's, unless somebody else has it."""
        if self._key is None:
            self._key = _own_name(self._store, self.probe_name, self)
        return self._key

    @property
    def counts(self) -> Counts:
        """What became of all that was captured."""
        return self._store.counts(self.key)

    def states(self, module: str | None = None) -> list[CapturedState]:
        """Return the states, in the order of the calls; of one module only, or of all."""
        if module is None:
            return self._store.states(self.key)
        return self.pick(module, slice(None))

    def each(self, module: str) -> Iterator[CapturedState]:
        """Yield a module's states; those on disk are read one at a time."""
        return self._store.each(self.key, self._name_of(module))

    def shells(self, module: str | None = None) -> list[CapturedState]:
        """Return the states without reading from disk: there, shapes stand for tensors."""
        return self._store.shells(self.key, None if module is None else self._name_of(module))

    @overload
    def pick(self, module: str, index: int) -> CapturedState: ...
    @overload
    def pick(self, module: str, index: slice) -> list[CapturedState]: ...
    def pick(self, module: str, index: int | slice) -> CapturedState | list[CapturedState]:
        """Return what stands at an index among a module's states; only that is read from disk."""
        return self._store.pick(self.key, index, self._name_of(module))

    def _name_of(self, module: str) -> str:
        """The name that a module is captured under."""
        clean = clean_name(module)  # also with the parts that wrappers add
        spelled = (module, clean, clean.removeprefix("module."))
        return next((self._names[one] for one in spelled if one in self._names), module)

    def __getitem__(self, module: str) -> Calls:
        if module not in self:
            raise NotCapturedError(self._nothing(module))
        return Calls(self, module)

    def __contains__(self, module: object) -> bool:
        return isinstance(module, str) and bool(self.shells(module))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(state.module for state in self.shells()))

    def keeps(self, content: str) -> bool:
        """Whether it was asked to keep `input`, `output`, `kwargs` or `gradient`."""
        return self._kept[content]

    def clear(self) -> None:
        """Free what was captured; capturing goes on."""
        self._free_failed()
        self._store.clear(self.key)

    def forget(self) -> None:
        """Free everything, counts included."""
        self._free_failed()
        self._store.forget(self.key)

    def _free_failed(self) -> None:
        """Free what came into calls that have failed, in this thread."""
        sites = {} if self.attachment is None else self.attachment.sites
        for name, waiting in self._here.came_in.items():
            del waiting[calls_running(sites[name].module) if name in sites else 0 :]

    def _nothing(self, module: str) -> str:
        known = [*self._names, *self]
        if module in self._names:
            why = "it was not called, or what was captured did not fit and was dropped or cleared"
            return f"Nothing of '{module}' is here: {why} ({self.counts})."
        there = f"There are {listed(dict.fromkeys(known))}."
        return f"The probe is not on '{module}'.{nearest(module, known)} {there}"

    def __repr__(self) -> str:
        return f"<Capture '{self.probe_name}' of {self.modules!r}: {self.counts}>"

    # -- copies -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """A copy is on no model and has captured nothing."""
        mine = {"_store", "_key", "_here", "_forwards", "_names", "attachment"}
        state = {name: value for name, value in self.__dict__.items() if name not in mine}
        options = {name: one for name, one in self.hookline_options.items() if name != "store"}
        return state | {"hookline_options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(None)


class Calls(Sequence[CapturedState]):
    """What was captured of one module: its calls, and what the last of them had."""

    def __init__(self, capture: Capture, module: str) -> None:
        self._capture = capture
        self._module = module

    @property
    def output(self) -> Any:
        """What the module returned."""
        return self._last("output")

    @property
    def input(self) -> Any:
        """The positional arguments, a tuple."""
        return self._last("input")

    @property
    def kwargs(self) -> Any:
        """The keyword arguments."""
        return self._last("kwargs")

    @property
    def gradient(self) -> Any:
        """The gradient of the output; None as long as there was no backward."""
        return self._last("gradient")

    def _last(self, content: str) -> Any:
        if not self._capture.keeps(content):
            raise ProbeError(
                f"The {content} of '{self._module}' was not captured. Ask for it: {content}=True."
            )
        return self[-1][content]

    @overload
    def __getitem__(self, index: int) -> CapturedState: ...
    @overload
    def __getitem__(self, index: slice) -> list[CapturedState]: ...
    def __getitem__(self, index: int | slice) -> CapturedState | list[CapturedState]:
        return self._capture.pick(self._module, index)

    def __iter__(self) -> Iterator[CapturedState]:
        return self._capture.each(self._module)

    def __len__(self) -> int:
        return len(self._capture.shells(self._module))

    def __repr__(self) -> str:
        shown = "\n ".join(repr(state) for state in self._capture.shells(self._module))
        return f"[{shown}]"


class _Here(threading.local):
    """What a probe knows of the forward that runs in this thread."""

    def __init__(self) -> None:
        self.came_in: dict[str, list[Any]] = {}  # into calls that run, by name: the innermost last
        self.due: dict[str, bool] = {}


_OWNERS = weakref.WeakKeyDictionary[Store, weakref.WeakValueDictionary[str, Capture]]()
_LOCK = threading.Lock()


def _own_name(store: Store, name: str, capture: Capture) -> str:
    """A name that no other capture has in a store that is shared."""
    with _LOCK:
        owners = _OWNERS.setdefault(store, weakref.WeakValueDictionary())
        free, number = name, 1
        while owners.get(free, capture) is not capture:
            number += 1
            free = f"{name}_{number}"
        owners[free] = capture
        return free


def bytes_of(megabytes: float | None) -> int | None:
    """Return megabytes as bytes."""
    if megabytes is not None and not math.isfinite(megabytes):
        raise ConfigError(
            f"memory_limit_mb is a number above 0, or None for no limit, not {megabytes}."
        )
    return None if megabytes is None else max(1, int(megabytes * 2**20))


def _limits(
    max_states: int | None,
    memory_limit_mb: float | None,
    policy: Policy,
    folder: str | None,
    *,
    shared: Store | None,
) -> dict[str, Any]:
    """What a store is made with."""
    own = (max_states, memory_limit_mb, policy, folder)
    if shared is not None and own != (None, _MEMORY_LIMIT_MB, "drop_oldest", None):
        raise ConfigError(
            "Capture: max_states, memory_limit_mb, policy and folder are the shared store's own. "
            "Give them to the store."
        )
    return {
        "max_states": max_states,
        "memory_limit": bytes_of(memory_limit_mb),
        "policy": policy,
        "folder": folder,
    }
