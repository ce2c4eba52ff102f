"""Monitor: statistics of the outputs of modules, and their time and memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hookline.errors import ConfigError, ProbeError, listed, nearest
from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.probes.call import Call
from hookline.probes.extractor import call_user_function
from hookline.probes.module_selection import Which
from hookline.probes.probe import Probe
from hookline.tensors.device_numbers import read_tensors, widest_float
from hookline.tensors.nested import tensors_in
from hookline.tensors.sharded import local, nested_values
from hookline.tensors.statistics import Totals, moments
from hookline.tensors.timing import BackwardTimes, Span, Times, graph_position, record_time

_MAX_UNREAD = 4096  # measurements on the device before they are read


DEFAULT_METRICS = ("mean", "std", "min", "max", "zeros", "nonfinite", "norm")
METRICS = (*DEFAULT_METRICS, "forward_time_ms", "backward_time_ms", "memory")


class Monitor(BuiltIn, Probe):
    """Reports statistics of the outputs of modules, and their time and memory.

    Each step that its schedule includes (`trainer.add_hook(monitor, every=100)`) is measured, all
    its batches together. Values are logged when the step ends, as `<prefix>/<module>/<metric>`,
    those of the model itself as `<prefix>/<metric>`. Outside of training every call is measured,
    and `report()` returns the values since the last report.

    Statistics are over all floating-point tensors anywhere in a module's output. Sums are kept on
    the device and read once per report. Values that are not finite are excluded from all statistics
    but `zeros`, and `nonfinite` is reported whenever there are any. A recomputation by activation
    checkpointing is not counted. With several ranks, the first one's values are logged.

    | metric | meaning |
    |---|---|
    | `mean`, `std`, `min`, `max`, `norm` | of the values (`std` without correction) |
    | `zeros` | the fraction of values that are zero |
    | `nonfinite` | the number of values that are NaN or infinite |
    | `forward_time_ms` | of all calls together, without the monitor's own time |
    | `backward_time_ms` | of all backwards together, including recomputation |
    | `memory` | bytes that a call allocates and that are still in use after it; the largest call |

    `memory` is measured on CUDA; elsewhere, and in compiled models, it is the size of the output.
    There are no times in compiled models, and no backward times within reentrant activation
    checkpointing.

    Args:
        modules: Which modules: names, globs, regular expressions, types, predicates, or modules
            themselves; None for none, only taps.
        metrics: Which of the above; by default mean, std, min, max, zeros, nonfinite and norm.
        prefix: The prefix of the names of logged values.
        functions: Custom metrics, by name: functions that take a tensor and return a number or a
            tensor with one element. Their values are averaged over tensors and calls. They must not
            change the tensor or use the random numbers of training.
        taps: Which of the values that `hookline.tap` names in the model's code: names or globs.
    """

    cost = (
        "In each step of its schedule about ten passes over each output, and one wait for the "
        "device; in other steps about a microsecond per call of a module."
    )
    hookline_group = HookGroup.MONITOR
    hookline_records = True
    probe_name = "monitor"
    wants_input = False
    _results = (
        *("_lock", "_measured", "_unread", "_totals", "_custom", "_memory"),
        *("_step", "_forward", "_backward"),
    )

    def __init__(
        self,
        modules: Which | None,
        metrics: list[str] | tuple[str, ...] | None = None,
        *,
        prefix: str = "probes",
        functions: Mapping[str, Callable[..., Any]] | None = None,
        taps: list[str] | tuple[str, ...] = (),
    ) -> None:
        super().__init__(modules, taps)
        if metrics is None:
            metrics = () if functions else DEFAULT_METRICS
        self.metrics = tuple(dict.fromkeys(metrics))
        self.functions = dict(functions or {})
        self.prefix = prefix
        self._check_options()
        self._statistics = [name for name in self.metrics if name in DEFAULT_METRICS]
        self._times_forward = "forward_time_ms" in self.metrics
        self._times_backward = "backward_time_ms" in self.metrics
        self._measures_memory = "memory" in self.metrics
        self.wants_before = self._times_forward or self._times_backward or self._measures_memory
        self._reset_results()

    def _check_options(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(
                    f"Monitor: unknown metric '{name}'.{nearest(name, METRICS)} The metrics are "
                    f"{listed(METRICS)}. Custom metrics are given as `functions`."
                )
        for name in self.functions:
            if name in METRICS:
                raise ConfigError(
                    f"Monitor: '{name}' is a built-in metric. Give the function another name."
                )
        if not self.metrics and not self.functions:
            raise ConfigError("Monitor has nothing to measure. Give metrics or functions.")

    def _reset_results(self) -> None:
        self._lock = Lock()
        self._discard()

    def _discard(self) -> None:
        self._measured = False
        self._step: int | None = None  # the one that was measured
        # Module, function (None for moments), size and value of each measurement.
        self._unread: deque[tuple[str, str | None, int, Any]] = deque()
        self._totals: dict[str, Totals] = {}
        self._custom: dict[tuple[str, str], tuple[float, int]] = {}  # sum and number of values
        self._memory: dict[str, int] = {}
        self._forward, self._backward = Times(), BackwardTimes()

    def before(self, call: Call) -> None:
        """Read the time and memory before a module runs; called only if these are measured."""
        device = _device_of(call)
        start = call.saved = _Start()
        if self._measures_memory:
            start.memory = _allocated(device)
        if self._times_backward:
            start.position = graph_position()
        if self._times_forward:
            start.span = Span(call.name, device)

    def after(self, call: Call) -> None:
        """Measure the output of a module, without waiting for the device."""
        with self._lock:
            if self._measured and call.step != self._step:
                self._discard()  # of a step without a report: the monitor was disabled
            self._measured, self._step = True, call.step
        output = call.output
        if isinstance(output, Tensor):
            tensors = [output]
        else:  # it may contain the same one in several places
            tensors = list({id(tensor): tensor for tensor in tensors_in(output)}.values())
        if not self.wants_before:
            self._measure(call, tensors)
            return
        device = tensors[0].device if tensors else None
        begin = record_time(device)
        self._measure_cost(call, tensors)
        self._measure(call, tensors)
        if self._times_forward and self.attachment is not None:
            end = record_time(device)
            for outer in self.attachment.running_calls:
                if outer.saved is not None and outer.saved.span is not None:
                    outer.saved.span.pause(begin, end)

    def _measure_cost(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Measure the time and memory of a call; in compiled models only the output's size."""
        start: _Start | None = call.saved
        if start is not None and start.span is not None:
            start.span.end = record_time(start.span.device)
            self._forward.add(start.span)
        if start is not None and self._times_backward:
            self._backward.watch(call.name, tensors, start.position)
        if self._measures_memory:
            before = None if start is None else start.memory
            now = None if before is None or not tensors else _allocated(tensors[0].device)
            if before is None or now is None:
                size = sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
            else:
                size = now - before
            with self._lock:
                self._memory[call.name] = max(self._memory.get(call.name, 0), size)

    def _measure(self, call: Call, tensors: Sequence[Tensor]) -> None:
        for output in tensors:
            tensor = _measurable(output)
            if tensor is None:
                continue
            if self._statistics:
                self._unread.append((call.name, None, tensor.numel(), moments(tensor)))
            for name, function in self.functions.items():
                returned = call_user_function(function, tensor, f"the output of '{call.name}'")
                value = _one_number(returned, name, call.name)
                self._unread.append((call.name, name, 1, value))
        if len(self._unread) > _MAX_UNREAD:
            with self._lock:
                self._read()

    def _read(self) -> None:
        """Add what was measured to the totals, with one wait for the device."""
        measured = [self._unread.popleft() for _ in range(len(self._unread))]
        values = read_tensors(value for *_, value in measured)
        for (module, function, size, _), value in zip(measured, values, strict=True):
            if function is None:
                self._totals.setdefault(module, Totals()).add(size, value)
            else:
                total, calls = self._custom.get((module, function), (0.0, 0))
                self._custom[module, function] = total + value, calls + 1

    def on_train_start(self) -> None:
        """Discard what was measured before training."""
        self._discard()

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Log the report if this step was measured."""
        if not self._measured:
            return
        # A skipped step does not count, so its number is the same.
        if self._step is not None and self._step not in (step - 1, step):
            self._discard()
            return
        for module, values in self.report().items():
            prefix = f"{self.prefix}/{module}" if module else self.prefix
            for metric, value in values.items():
                trainer.log(f"{prefix}/{metric}", value)

    def report(self, reset: bool = True) -> dict[str, dict[str, Any]]:
        """Return what was measured since the last report, by module and metric, and start over.

        With `reset=False`, what was measured is kept, and the next report includes it. This waits
        for the device once. Metrics without a value, such as the time of a backward that did not
        run, are omitted, and so are modules that were not called.
        """
        with self._lock:
            self._read()
            found: dict[str, dict[str, Any]] = {}
            for module, totals in self._totals.items():
                found[module] = self._metrics_of(totals)
            for (module, function), (total, calls) in self._custom.items():
                found.setdefault(module, {})[function] = total / calls
            costs: dict[str, Mapping[str, float]] = {
                "forward_time_ms": self._forward.sums(reset=reset),
                "backward_time_ms": self._backward.sums(reset=reset),
                "memory": self._memory,
            }
            if reset:
                self._measured = False
                self._totals, self._custom, self._memory = {}, {}, {}
        for metric, values in costs.items():
            for name, value in values.items():
                found.setdefault(name, {})[metric] = value
        return self._sort(found)

    def _metrics_of(self, totals: Totals) -> dict[str, float]:
        if not totals.size:
            return {}
        values = {name: totals.metric(name) for name in self._statistics}
        if totals.finite < totals.size:
            values["nonfinite"] = totals.metric("nonfinite")
        return values

    def _sort(self, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the modules in the order of the model, the metrics in that of the options."""
        sites = self.attachment.sites if self.attachment is not None else {}
        metrics = (*self.metrics, *self.functions, "nonfinite")
        return {
            name: {metric: found[name][metric] for metric in metrics if metric in found[name]}
            for name in (*sites, *(name for name in found if name not in sites))
            if found.get(name)
        }


@dataclass(slots=True)
class _Start:
    """The state at the start of a module's call."""

    span: Span | None = None
    position: int = 0
    memory: int | None = None


def _device_of(call: Call) -> torch.device | None:
    """Return the device that a module is about to compute on."""
    for tensor in tensors_in((call.args, call.kwargs)):
        return tensor.device
    parameters = () if call.module is None else call.module.parameters()
    return next((parameter.device for parameter in parameters), None)


def _allocated(device: torch.device | None) -> int | None:
    """Return how many bytes the CUDA allocator has in use; None on other devices."""
    if device is None or device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device)


def _measurable(tensor: Tensor) -> Tensor | None:
    """Return what is measured of a tensor: this rank's part; None if it is not floating-point."""
    if not tensor.is_floating_point():
        return None
    if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    tensor = local(tensor)
    if tensor.is_nested:
        tensor = nested_values(tensor)
    return tensor if tensor.layout is torch.strided else None


def _one_number(value: Any, name: str, module: str) -> Any:
    """Return what a function returned, without reading a tensor; raise if it is not one number."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(widest_float(value.device), copy=True)
    if isinstance(value, int | float):
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise ProbeError(
        f"The metric '{name}' returned a {type(value).__name__}{shape} for '{module}'. Return "
        "a number, or a tensor with one element."
    )
