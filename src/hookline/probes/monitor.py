"""Monitor: statistics of what modules give, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from threading import local as thread_local
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from hookline.errors import ConfigError, ProbeError, listed, nearest
from hookline.hook import Hook, Rank
from hookline.options import BuiltIn
from hookline.probes.attachment import Call
from hookline.probes.module_selection import Which
from hookline.probes.probe import Probe
from hookline.probes.timing import BackwardTimes, Span, Times, graph_position, mark
from hookline.tensors.counts import Alive, Histograms, unit_dimension
from hookline.tensors.nested import tensors_in
from hookline.tensors.observation import Observation
from hookline.tensors.sharded import local
from hookline.tensors.statistics import Bounds, RunningSums, Totals, wide

__all__ = ["DEFAULT_METRICS", "METRICS", "Monitor"]

DEFAULT_METRICS = ("mean", "std", "min", "max", "zeros", "nonfinite", "norm")
METRICS = (
    *DEFAULT_METRICS,
    *("histogram", "dead", "saturation", "forward_time_ms", "backward_time_ms", "memory"),
)

_OF_TOTALS: dict[str, Callable[[Totals], float]] = {
    "mean": lambda totals: totals.mean,
    "std": lambda totals: totals.std,
    "min": lambda totals: totals.low,
    "max": lambda totals: totals.high,
    "zeros": lambda totals: (totals.size - totals.nonzero) / totals.size,
    "nonfinite": lambda totals: totals.size - totals.finite,
    "norm": lambda totals: totals.norm,
    "saturation": lambda totals: totals.saturated / totals.size,
}


class Monitor(BuiltIn, Probe):
    """Reports statistics of what modules give, and the time and memory they take.

    Only the steps that end with a report are measured, all their batches together; in the others
    a call of a module costs a look at the step's number. Values are logged when the step ends, as
    `<prefix>/<module>/<metric>`, those of the model itself as `<prefix>/<metric>`. Outside of
    training every call is measured, and `report()` returns what came together.

    Statistics are over all floating tensors of a module's output, wherever they stand in it. Sums
    are kept on the device, in single precision or better, and read once per report. Values that
    are not finite are left out of all statistics but `zeros`, and `nonfinite` is reported whenever
    there are any, asked for or not. A recomputation by activation checkpointing is not counted. On
    several ranks each measures what it computes; the record has the numbers of the first.

    | metric | what it is |
    |---|---|
    | `mean`, `std`, `min`, `max`, `norm` | of the values themselves (`std` without correction) |
    | `zeros` | the share of values that are zero |
    | `nonfinite` | how many values are NaN or infinite |
    | `histogram` | counts in bins of equal width on a logarithmic scale, the same in each report |
    | `dead` | the share of units that gave nothing but zeros |
    | `saturation` | the share of values near the bounds of what the module can give |
    | `forward_time_ms` | all calls together, without what the monitor did meanwhile |
    | `backward_time_ms` | all backwards together, with recomputation where there is any |
    | `memory` | bytes that a call has allocated and that are not free after it; the largest call |

    Units stand along the last dimension. In what convolutions and their norms give they are the
    channels; in whatever else has more than three dimensions they stand along the second.
    `saturation` knows the bounds of PyTorch's own bounded activations (tanh, sigmoid, hardtanh …);
    for other modules they are plus and minus the largest magnitude in the tensor. `memory` is known
    on CUDA; elsewhere, and in compiled models, it is the size of what the module returns. Times are
    not known in compiled models; nor are backward times within activation checkpointing of the
    reentrant kind.

    Args:
        modules: which: names, globs, regular expressions, types, predicates, or modules themselves;
            None: none, only taps.
        metrics: which of those above; by default mean, std, min, max, zeros, nonfinite and norm.
        every: report in each N-th optimizer step.
        prefix: what the names of logged values begin with.
        functions: metrics of your own, by name: functions that take a tensor and return a number or
            a tensor with one element. What they return is averaged over tensors and calls. They may
            not change the tensor or draw random numbers of training's.
        saturated_at: a value is saturated when it is further from the middle between the bounds
            than this share of the distance to them.
        bounds: the bounds that `saturation` uses for all modules, instead of those it knows.
        bins: how many bins a histogram has for each doubling of the magnitude.
        unit_dim: the dimension along which units stand, for `dead`; None: as said above.
        taps: which of the values that `hookline.tap` names in the model's code: names or globs.
    """

    cost = (
        "Some microseconds per call of a module in steps without a report. In a report one or two "
        "passes over each output for mean and deviation, up to ten for all metrics, and one wait "
        "for the device."
    )
    hookline_rank = Rank.MONITOR
    probe_name = "monitor"
    wants_input = False

    def __init__(
        self,
        modules: Which | None,
        metrics: list[str] | tuple[str, ...] | None = None,
        every: PositiveInt = 100,
        *,
        prefix: str = "probes",
        functions: Mapping[str, Callable[..., Any]] | None = None,
        saturated_at: Annotated[float, Field(gt=0, lt=1)] = 0.97,
        bounds: tuple[float, float] | None = None,
        bins: PositiveInt = 4,
        unit_dim: int | None = None,
        taps: list[str] | tuple[str, ...] = (),
    ) -> None:
        super().__init__(modules, taps)
        if metrics is None:
            metrics = () if functions else DEFAULT_METRICS
        self.metrics = tuple(dict.fromkeys(metrics))
        self.functions = dict(functions or {})
        self.every = every
        self.prefix = prefix
        self.saturated_at = saturated_at
        self.bounds = bounds
        self.bins = bins
        self.unit_dim = unit_dim
        self._check()
        self._observers = {name: _Function(f) for name, f in self.functions.items()}
        wanted = set(self.metrics)
        self._sums_wanted = bool(wanted & set(_OF_TOTALS))
        self._bounded = "saturation" in wanted
        self._timed = "forward_time_ms" in wanted
        self._timed_back = "backward_time_ms" in wanted
        self._weighed = "memory" in wanted
        self.wants_before = self._timed or self._timed_back or self._weighed
        self._begin()

    def _check(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(
                    f"Monitor: '{name}' is no metric.{nearest(name, METRICS)} There are "
                    f"{listed(METRICS)}. One of your own goes into `functions`."
                )
        for name in self.functions:
            if name in METRICS:
                raise ConfigError(
                    f"Monitor: '{name}' is a metric already. Give your function another name."
                )
        if not self.metrics and not self.functions:
            raise ConfigError("Monitor has nothing to measure: give metrics or functions.")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ConfigError(f"Monitor: bounds go from low to high, and not {self.bounds}.")

    def _begin(self) -> None:
        self._lock = Lock()
        self._running = _Running()
        self._forget()

    def _forget(self) -> None:
        wanted = set(self.metrics)
        self._numbers: dict[str, int] = {}
        self._measured = False
        self._step: int | None = None  # that which was measured
        self._sums = RunningSums(
            spread=bool(wanted & {"std", "norm"}),
            extremes=bool(wanted & {"min", "max"}),
            zeros="zeros" in wanted,
            saturated_at=self.saturated_at if "saturation" in wanted else None,
        )
        self._histograms = Histograms(self.bins) if "histogram" in wanted else None
        self._alive = Alive() if "dead" in wanted else None
        self._own: dict[tuple[str, str], _Mean] = {}
        self._memory: dict[str, int] = {}
        self._forward, self._backward = Times(), BackwardTimes()

    # -- calls ------------------------------------------------------------------------------------

    def began(self) -> None:
        """The model's outermost call begins: what is said to be running still has failed."""
        self._running.calls.clear()

    def before(self, call: Call) -> None:
        """A module is about to run; asked for only where it is timed or weighed."""
        if not self._is_due(call):
            return
        device = _device_of(call)
        running = _Call(call.name)
        if self._weighed:
            running.memory = _allocated(device)
        if self._timed_back:
            running.position = graph_position()
        self._running.calls.append(running)
        if self._timed:
            running.span = Span(call.name, device)

    def after(self, call: Call) -> None:
        """A module has run: measure what it gave. Nothing waits for the device."""
        if not self._is_due(call):
            return
        self._note_step(call.step)
        output = call.output
        tensors = [output] if isinstance(output, Tensor) else _distinct(tensors_in(output))
        if not self.wants_before:
            self._measure(call, tensors)
            return
        device = tensors[0].device if tensors else None
        begin = mark(device)
        self._note_cost(call, tensors)
        self._measure(call, tensors)
        if self._timed and self._running.calls:
            end = mark(device)
            for running in self._running.calls:
                if running.span is not None:
                    running.span.pause(begin, end)

    def _note_step(self, step: int | None) -> None:
        with self._lock:
            if self._measured and step != self._step:
                self._forget()  # a step that has not come to its report: the monitor was off
            self._measured, self._step = True, step

    def _note_cost(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Take down what a call has taken; in compiled models no beginning is known."""
        running = self._running.ended(call.name)
        if running is not None and running.span is not None:
            running.span.end = mark(running.span.device)
            self._forward.add(running.span)
        if running is not None and self._timed_back:
            self._backward.watch(call.name, tensors, running.position)
        if self._weighed:
            before = None if running is None else running.memory
            now = None if before is None or not tensors else _allocated(tensors[0].device)
            weight = _weight(tensors) if before is None or now is None else now - before
            with self._lock:
                self._memory[call.name] = max(self._memory.get(call.name, 0), weight)

    def _is_due(self, call: Call) -> bool:
        return call.step is None or (call.step + 1) % self.every == 0

    def _measure(self, call: Call, tensors: Sequence[Tensor]) -> None:
        name = call.name
        number = self._numbers.get(name)
        if number is None:
            with self._lock:
                number = self._numbers.setdefault(name, len(self._numbers))
        for position, given in enumerate(tensors):
            tensor = _strided(given)
            if tensor is None:
                continue
            if self._sums_wanted:
                self._sums.add(number, tensor, self._bounds_of(call.module))
            if self._histograms is not None:
                self._histograms.add(name, tensor)
            if self._alive is not None:
                dim = self.unit_dim
                dim = unit_dimension(call.module, tensor) if dim is None else dim
                self._alive.add(name, position, tensor, dim)
            if self._observers:
                self._look(name, tensor)

    def _bounds_of(self, module: nn.Module | None) -> Bounds:
        if not self._bounded:
            return None
        return self.bounds if self.bounds is not None else _known_bounds(module)

    def _look(self, module: str, tensor: Tensor) -> None:
        """Let the functions look, and take down what they return."""
        for name, observer in self._observers.items():
            seen = Observation(tensor, f"the output of '{module}'")
            found: list[Any] = []
            seen.carry(observer, observer.note, (seen.activations, found), {})
            value = _one_number(found[0], name, module)
            with self._lock:
                self._own.setdefault((module, name), _Mean()).add(value)

    # -- reports ----------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Training begins: what is left of another does not belong to it."""
        self._forget()

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Report, if this step was measured."""
        if not self._measured:
            return
        # After a step that was skipped, its number is the same.
        if self._step is not None and self._step not in (step - 1, step):
            self._forget()
            return
        for module, values in self.report().items():
            start = f"{self.prefix}/{module}" if module else self.prefix
            for metric, value in values.items():
                kind = "histogram" if metric == "histogram" else "scalar"
                trainer.log(f"{start}/{metric}", value, kind)

    def report(self) -> dict[str, dict[str, Any]]:
        """Return what was measured since the last report, by module and metric, and begin anew.

        It waits for the device once. A metric that is not known, such as the time of a backward
        that was not run, is left out; so is a module that was not called.
        """
        self._measured = False
        names = list(self._numbers)
        table = self._sums.take(len(names)) if self._sums_wanted else None
        counts = self._histograms.take() if self._histograms is not None else {}
        alive = self._alive.take() if self._alive is not None else {}
        with self._lock:
            own, self._own = self._own, {}
            memory, self._memory = self._memory, {}
        living = [count for several, _ in alive.values() for count in several]
        averages = [one.total / one.calls for one in own.values()]
        unread = [*([] if table is None else [table]), *counts.values(), *living, *averages]
        read = iter(_read(unread))

        found: dict[str, dict[str, Any]] = {name: {} for name in names}
        if table is not None:
            for number, totals in RunningSums.read(next(read)).items():
                found[names[number]] = self._of_totals(totals)
        for name in counts:
            assert self._histograms is not None
            found[name]["histogram"] = self._histograms.shape(next(read))
        for name, (several, units) in alive.items():
            found[name]["dead"] = (units - sum(next(read) for _ in several)) / units
        for name, metric in own:
            found[name][metric] = next(read)
        costs: dict[str, Mapping[str, float]] = {
            "forward_time_ms": self._forward.take(),
            "backward_time_ms": self._backward.take(),
            "memory": memory,
        }
        for metric, values in costs.items():
            for name, value in values.items():
                found.setdefault(name, {})[metric] = value
        return self._in_order(found)

    def _of_totals(self, totals: Totals) -> dict[str, Any]:
        values = {name: _OF_TOTALS[name](totals) for name in self.metrics if name in _OF_TOTALS}
        if totals.finite < totals.size:
            values["nonfinite"] = totals.size - totals.finite
        return values

    def _in_order(self, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Modules in the order of the model, metrics in that which they were asked for."""
        sites = self.attachment.sites if self.attachment is not None else {}
        metrics = (*self.metrics, *self.functions, "nonfinite")
        return {
            name: {metric: found[name][metric] for metric in metrics if metric in found[name]}
            for name in (*sites, *(name for name in found if name not in sites))
            if found.get(name)
        }

    # -- copies -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a monitor has measured nothing."""
        return {name: value for name, value in super().__getstate__().items() if name not in _BEGUN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


_BEGUN = (
    *("_lock", "_numbers", "_measured", "_sums", "_histograms", "_alive", "_own", "_memory"),
    *("_step", "_forward", "_backward", "_running"),
)
"""What belongs to one monitor, on one model."""


class _Function(Hook):
    """Somebody's function, with a name for messages."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.hookline_function = function

    def note(self, tensor: Tensor, found: list[Any]) -> None:
        """Take down what the function says of a tensor."""
        assert self.hookline_function is not None
        found.append(self.hookline_function(tensor))


class _Mean:
    """A sum, and of how many."""

    def __init__(self) -> None:
        self.total: Any = 0.0
        self.calls = 0

    def add(self, value: Any) -> None:
        """Add a number or a tensor; a view of what a function looked at is not kept."""
        if self.calls and isinstance(self.total, Tensor) and isinstance(value, Tensor):
            value = value.to(self.total.device)
        self.total = self.total + value
        self.calls += 1


@dataclass(slots=True)
class _Call:
    """A call of a module that is running, and what there was before it."""

    name: str
    span: Span | None = None
    position: int = 0
    memory: int | None = None


class _Running(thread_local):
    """The calls that are running in this thread, each within the one before it."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def ended(self, name: str) -> _Call | None:
        """Return the innermost call of a module; those within it have failed, or are over."""
        for i in range(len(self.calls) - 1, -1, -1):
            if self.calls[i].name == name:
                found = self.calls[i]
                del self.calls[i:]
                return found
        return None


def _device_of(call: Call) -> torch.device | None:
    """Where a module is about to compute."""
    for tensor in tensors_in((call.args, call.kwargs)):
        return tensor.device
    parameters = () if call.module is None else call.module.parameters()
    return next((parameter.device for parameter in parameters), None)


def _allocated(device: torch.device | None) -> int | None:
    """How many bytes are allocated there, by the host's own books; None where there are none."""
    if device is None or device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device)


def _weight(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)


def _distinct(tensors: Iterator[Tensor]) -> list[Tensor]:
    """Each tensor once: models return the same one in several places."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _strided(tensor: Tensor) -> Tensor | None:
    """What of a tensor is measured: this rank's part, if it is floating; None for none."""
    if not tensor.is_floating_point():
        return None
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        return tensor
    tensor = local(tensor)
    if tensor.is_nested and tensor.layout is torch.jagged:
        tensor = tensor.values()
    return tensor if tensor.layout is torch.strided and not tensor.is_nested else None


def _known_bounds(module: nn.Module | None) -> Bounds:
    """The bounds of what a module can give, where it is one of PyTorch's own."""
    if isinstance(module, nn.Hardtanh):  # ReLU6 is one
        return float(module.min_val), float(module.max_val)
    if isinstance(module, nn.Tanh | nn.Softsign):
        return -1.0, 1.0
    if isinstance(module, nn.Sigmoid | nn.Hardsigmoid):
        return 0.0, 1.0
    return None


def _one_number(value: Any, name: str, module: str) -> Any:
    """Check what a function returned; a tensor stays unread."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(wide(value.device))
    if isinstance(value, int | float):
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise ProbeError(
        f"The metric '{name}' returned a {type(value).__name__}{shape} for '{module}'. A metric is "
        "one number: return a number, or a tensor with one element."
    )


def _read(unread: Sequence[Any]) -> list[Any]:
    """Bring tensors to the host by one transfer; numbers stay as they are."""
    tensors = [one for one in unread if isinstance(one, Tensor)]
    if not tensors:
        return list(unread)
    home = tensors[0].device
    flat = torch.cat([tensor.to(home, wide(home)).reshape(-1) for tensor in tensors])
    values = iter(flat.tolist())
    return [_shaped(one, values) if isinstance(one, Tensor) else one for one in unread]


def _shaped(tensor: Tensor, values: Iterator[float]) -> Any:
    if not tensor.ndim:
        return next(values)
    if tensor.ndim == 1:
        return [next(values) for _ in range(len(tensor))]
    return [[next(values) for _ in range(tensor.shape[1])] for _ in range(len(tensor))]
