"""Capture: keeps the inputs, outputs and gradients of modules. `probe` is its short form."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, overload

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from hookline.arguments import (
    check_instance,
    check_number,
    check_whole_number,
    listed_strings,
    show_value,
)
from hookline.errors import ConfigError, ProbeError, listed, nearest
from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.probes.call import Call
from hookline.probes.extractor import OutputGradients, TensorExtractor
from hookline.probes.module_selection import Which
from hookline.probes.probe import Probe
from hookline.probes.store import CapturedState, Counts, Store
from hookline.tensors.name_patterns import clean_name
from hookline.tensors.nested import tensors_in

_MEMORY_LIMIT_MB = 1024.0


class NotCapturedError(ProbeError, KeyError):
    """Nothing was captured under this name."""


def probe(
    model: torch.nn.Module,
    which: Which | None = None,
    *,
    taps: str | Sequence[str] = (),
    every: int = 1,
    **options: Any,
) -> ProbeResults:
    """Capture the outputs of some modules until the end of the `with` block, or until `close()`.

    Outputs are captured as copies: a later in-place operation, such as an in-place ReLU, does not
    change them. Calls are kept up to 1 GB; then the oldest are dropped, with a warning, and
    `counts` says how many. `memory_limit_mb=None` keeps all.

    Args:
        model: The model.
        which: Its modules: a name, a glob such as `"blocks.*.mlp"`, a regular expression, a type, a
            function of name and module, a module, or a list of these.
        taps: Names of values in the model's code, as given to `hookline.tap`, or globs.
        every: Capture only in the forwards N, 2N, 3N … of the model, and all calls of its modules
            outside of its own forward.
        options: Options of `Capture`: `input=True` and `kwargs=True` also keep the arguments,
            `gradient=True` the gradients of outputs; `device`, `dtype`, `select` …

    Returns:
        A mapping from names of modules and taps to their captured calls.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> with probe(model, "0") as results:
        ...     _ = model(torch.ones(1, 2))
        >>> results["0"].output.shape
        torch.Size([1, 3])
    """
    defaults: dict[str, Any] = {"input": False, "kwargs": False}
    check_whole_number("probe(…, every=…)", every, 1)
    taps = tuple(listed_strings("probe(…, taps=…)", taps))
    capture = Capture(which, **{**defaults, **options}, taps=taps)
    try:
        capture.attach(model, name="probe", every=None if every == 1 else int(every))
        return ProbeResults(capture)
    except BaseException:  # Ctrl-C may come before the results are returned
        capture.detach()
        raise


class Capture(BuiltIn, Probe):
    """Keeps the inputs, outputs and gradients of modules.

    `capture["blocks.3.mlp"]` has what was captured of a module: `.output`, `.input`, `.kwargs` and
    `.gradient` are those of its last call, and the calls themselves can be indexed and iterated
    over. `capture.states()` returns all of them in order. Both also work after training.

    Tensors are found anywhere in inputs and outputs: in tuples, lists, mappings and objects, such
    as the cache of a Hugging Face model, which is copied as it was. An object that holds tensors
    and cannot be copied, or is nested too deeply, is replaced by a `NotCopied` that names its
    class.

    Args:
        modules: Which modules: names, globs such as `"blocks.*.mlp"`, regular expressions, types,
            functions of name and module, or modules themselves.
        input: Keep the positional arguments, as they were before the module ran.
        output: Keep what it returned.
        kwargs: Keep the keyword arguments.
        gradient: Keep the gradient of the output in the last backward. It is None
            without a backward, in compiled models and reentrant activation checkpointing, for a
            leaf that is returned, such as a parameter, which has its own `.grad`, and for a view
            that is changed in place, if it is not that of a linear layer.
        device: Where to keep tensors; by default on their device. Copying to `"cpu"` waits for it.
        dtype: The dtype to keep floating-point tensors in, such as `"float16"`; by default theirs.
        select: The part of each tensor to keep: an index, such as `0`, `slice(4)` or `":, -1"`, or
            a function that returns a tensor, such as `lambda x: x.mean(0)`.
        layer_idx: The layer's number, for the states; by default the first number in the module's
            name, if it has one.
        max_states: How many states to keep, over all modules; by default all.
        memory_limit_mb: How many megabytes (of 1024² bytes) to keep; None for no limit. The oldest
            states are dropped, with a warning; `counts` says how many.
        store: A store to share with other probes, with its own limits.
        taps: Which of the values that `hookline.tap` names in the model's code: names or globs.
            These have an output only.
    """

    cost: ClassVar[str] = (
        "A copy of what is kept, and a few microseconds for each call of a module; more with "
        "`input` or `kwargs`."
    )
    hookline_group = HookGroup.MONITOR
    probe_name = "capture"
    _results = ("store", "_key", "_names")

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
        layer_idx: Annotated[int, Field(ge=0)] | None = None,
        max_states: PositiveInt | None = None,
        memory_limit_mb: PositiveFloat | None = _MEMORY_LIMIT_MB,
        store: Store | None = None,
        taps: str | list[str] | tuple[str, ...] = (),
    ) -> None:
        super().__init__(modules, taps)
        if not (input or output or kwargs or gradient):
            raise ConfigError(
                "Capture has nothing to keep. Enable input, output, kwargs or gradient."
            )
        self._contents = {"input": input, "output": output, "kwargs": kwargs, "gradient": gradient}
        self.wants_before = self.wants_input = input or kwargs
        self._extractor = TensorExtractor(self, device, dtype, select)
        self._copies_output = output and self._extractor.copies_only
        self._layer_idx = layer_idx
        if store is not None and (max_states, memory_limit_mb) != (None, _MEMORY_LIMIT_MB):
            raise ConfigError(
                "Capture: max_states and memory_limit_mb are options of the shared store. Give "
                "them to the store."
            )
        self._limits = (max_states, bytes_of(memory_limit_mb))
        self._reset_results()
        if store is not None:
            self.store = store

    def _reset_results(self) -> None:
        self.store = Store(*self._limits)
        """The store of the states."""
        self._key = object()  # of its states in the store
        self._layers: dict[str, int | None] = {}
        self._names: set[str] = set()  # of its modules

    def choose(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Return the model's modules to capture, and note their names."""
        chosen = super().choose(model)
        self._names.update(chosen)
        return chosen

    def before(self, call: Call) -> None:
        """Capture the arguments before the module runs, since it may change them in place."""
        call.saved = self._capture_inputs(call)

    def after(self, call: Call) -> None:
        """Capture a call of a module."""
        name = call.name
        layer = self._layers[name] if name in self._layers else self._layer_of(name)
        state = CapturedState(name, self.probe_name, call.step, call.epoch, call.index, layer)
        if self.wants_input and call.module is not None:
            saved = None if call.input_replaced else call.saved
            state.input, state.kwargs = saved or self._capture_inputs(call)
        output = call.output
        if type(output) is Tensor and self._copies_output:  # the usual case
            state.output = output.detach().clone()
        elif self._contents["output"]:
            state.output = self._extractor.extract(output, name)
        key = self.store.add(self._key, state)
        if self._contents["gradient"]:
            self._expect_gradient(call, key)

    def _capture_inputs(self, call: Call) -> Any:
        args = call.args if self._contents["input"] else None
        kwargs = dict(call.kwargs) if self._contents["kwargs"] else None
        return self._extractor.extract((args, kwargs), call.name)

    def _layer_of(self, name: str) -> int | None:
        numbers = (int(part) for part in name.split(".") if part.isdecimal())
        layer = next(numbers, None) if self._layer_idx is None else self._layer_idx
        self._layers[name] = layer
        return layer

    def _expect_gradient(self, call: Call, key: int) -> None:
        if not self.can_see_gradients(call):
            return
        has_graph = any(tensor.grad_fn is not None for tensor in tensors_in(call.output))
        if has_graph and self.attachment is not None:
            guard = self.attachment.guard
            gradients = OutputGradients(call.name, self._extractor, self.store, key, guard)
            gradients.expect(call.output)

    @property
    def counts(self) -> Counts:
        """How many states there were, and where they are."""
        return self.store.counts(self._key)

    def states(self, module: str | None = None) -> list[CapturedState]:
        """Return the states of one module, or of all, in the order of the calls."""
        return self.store.states(self._key, None if module is None else self._resolve(module))

    def _resolve(self, module: str) -> str:
        """Return the name that a module is captured under."""
        check_instance("module", module, str, "the name of a module or tap")
        clean = clean_name(module)  # without the prefixes of wrappers
        candidates = (module, clean, clean.removeprefix("module."))
        return next((name for name in candidates if name in self._names), module)

    def __getitem__(self, module: str) -> Calls:
        if module not in self:
            raise NotCapturedError(self._explain_missing(module))
        return Calls(self, module)

    def __contains__(self, module: object) -> bool:
        return isinstance(module, str) and bool(self.states(module))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(state.module for state in self.states()))

    def keeps(self, content: str) -> bool:
        """Return whether `input`, `output`, `kwargs` or `gradient` is captured."""
        return self._contents[content]

    def clear(self) -> None:
        """Free the states; capturing continues."""
        self.store.clear(self._key)

    def forget(self) -> None:
        """Free the states and reset the counts."""
        self.store.forget(self._key)

    def _explain_missing(self, module: Any) -> str:
        if not isinstance(module, str):
            return f"A module or tap has a name, not {show_value(module)}."
        if module in self._names:
            cause = "it was not called, or its states were dropped or cleared"
            return f"There is no state of '{module}': {cause} ({self.counts})."
        known = sorted({*self._names, *self})
        hint = f"{nearest(module, known)} It is attached to {listed(known)}."
        return f"The probe has no module or tap of the name '{module}'.{hint}"

    def __repr__(self) -> str:
        return f"<Capture '{self.probe_name}' of {self.modules!r}: {self.counts}>"

    def __getstate__(self) -> dict[str, Any]:
        """Copy the options but for a shared store."""
        options = {name: value for name, value in self.hookline_options.items() if name != "store"}
        return super().__getstate__() | {"hookline_options": options}


class Calls(Sequence[CapturedState]):
    """The captured calls of one module, with shortcuts to the contents of the last one."""

    def __init__(self, capture: Capture, module: str) -> None:
        self._capture = capture
        self._module = module

    @property
    def output(self) -> Any:
        """The output of the last call."""
        return self._last("output")

    @property
    def input(self) -> Any:
        """The positional arguments of the last call, a tuple."""
        return self._last("input")

    @property
    def kwargs(self) -> Any:
        """The keyword arguments of the last call."""
        return self._last("kwargs")

    @property
    def gradient(self) -> Any:
        """The gradient of the last output; None until its backward."""
        return self._last("gradient")

    def _last(self, content: str) -> Any:
        if not self._capture.keeps(content):
            raise ProbeError(
                f"The {content} of '{self._module}' was not captured. Use {content}=True."
            )
        return self[-1][content]

    @overload
    def __getitem__(self, index: int) -> CapturedState: ...
    @overload
    def __getitem__(self, index: slice) -> list[CapturedState]: ...
    def __getitem__(self, index: int | slice) -> CapturedState | list[CapturedState]:
        return self._capture.states(self._module)[index]

    def __iter__(self) -> Iterator[CapturedState]:
        return iter(self._capture.states(self._module))

    def __len__(self) -> int:
        return len(self._capture.states(self._module))

    def __repr__(self) -> str:
        lines = "\n ".join(repr(state) for state in self)
        return f"[{lines}]"


class ProbeResults(Mapping[str, Calls]):
    """The captured calls, by the names of modules and taps.

    `results[name]` is a sequence of all captured calls, `results[name].output` the output of the
    last one. Results can be read at any time, also after `close()`, until `clear()`.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        """The probe."""

    def __getitem__(self, name: str) -> Calls:
        return self.capture[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.capture)

    def __len__(self) -> int:
        return sum(1 for _ in self.capture)

    def __bool__(self) -> bool:
        return True  # also before anything was captured

    def __repr__(self) -> str:
        last = {state.module: state for state in self.capture.states()}
        lines = "\n".join(f"  {name!r}: {state!r}" for name, state in last.items())
        if self.counts.dropped:
            lines += f"\n  # {self.counts.dropped} of {self.counts.captured} states were dropped"
        return f"ProbeResults({{\n{lines}\n}})" if lines else "ProbeResults({})"

    def states(self, name: str | None = None) -> list[CapturedState]:
        """Return all states in the order of the calls, or those of one name."""
        return self.capture.states(name)

    @property
    def counts(self) -> Counts:
        """How many states were captured, kept and dropped."""
        return self.capture.counts

    def enable(self) -> None:
        """Resume capturing."""
        if self.capture.attachment is not None:
            self.capture.attachment.enable()

    def disable(self) -> None:
        """Pause capturing."""
        if self.capture.attachment is not None:
            self.capture.attachment.disable()

    def clear(self) -> None:
        """Free the captured states."""
        self.capture.clear()

    def close(self) -> None:
        """Detach the probe from the model; the captured states are kept."""
        self.capture.detach()

    def __enter__(self) -> ProbeResults:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def bytes_of(megabytes: float | None) -> int | None:
    """Return megabytes as bytes."""
    if megabytes is None:
        return None
    check_number("memory_limit_mb", megabytes, 0, is_included=False)
    return max(1, int(min(megabytes * 2**20, sys.maxsize)))
