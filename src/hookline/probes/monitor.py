"""Monitor: statistics of the outputs of modules, and their time and memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hookline.errors import ConfigError, listed, nearest
from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.probes.call import Call
from hookline.probes.module_selection import Which
from hookline.probes.probe import Probe
from hookline.tensors.device_numbers import read_tensors
from hookline.tensors.histograms import describe_histogram, merge_bins
from hookline.tensors.nested import tensors_in
from hookline.tensors.running_statistics import (
    ActiveUnits,
    RunningHistograms,
    RunningSums,
    Totals,
    unit_dimension,
)
from hookline.tensors.sharded import local, nested_values
from hookline.tensors.timing import Times, record_time

_FROM_TOTALS: dict[str, Callable[[Totals], float]] = {
    "mean": lambda totals: totals.mean,
    "std": lambda totals: totals.std,
    "min": lambda totals: totals.low,
    "max": lambda totals: totals.high,
    "zeros": lambda totals: (totals.size - totals.nonzero) / totals.size,
    "nonfinite": lambda totals: totals.size - totals.finite,
    "norm": lambda totals: totals.norm,
}
DEFAULT_METRICS = tuple(_FROM_TOTALS)
METRICS = (*DEFAULT_METRICS, "histogram", "dead", "forward_time_ms", "memory")


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
    | `histogram` | counts in four bins for each doubling of the magnitude, always the same |
    | `dead` | the fraction of units whose values were all zero |
    | `forward_time_ms` | of all calls together; with what measuring modules within it takes |
    | `memory` | bytes that a call allocates and that are still in use after it; the largest call |

    Units are along the last dimension, in the outputs of convolutions and other outputs of more
    than three dimensions along the channels. `memory` is measured on CUDA; elsewhere, and in
    compiled models, it is the size of the output. There are no times in compiled models.

    Args:
        modules: Which modules, as for every probe; None for none, only taps.
        metrics: Which of the above; by default mean, std, min, max, zeros, nonfinite and norm.
        prefix: The prefix of the names of logged values.
        taps: Which of the values that `hookline.tap` names: names or globs.
    """

    cost = (
        "In each step of its schedule one or two passes over each output for mean and deviation, "
        "up to ten for all metrics, and one wait for the device; otherwise about a microsecond per "
        "call of a module."
    )
    hookline_group = HookGroup.MONITOR
    hookline_records = True
    probe_name = "monitor"
    wants_input = False
    _results = (
        *("_lock", "_measured", "_sums", "_histograms", "_alive", "_memory"),
        *("_step", "_forward"),
    )

    def __init__(
        self,
        modules: Which | None,
        metrics: list[str] | tuple[str, ...] | None = None,
        *,
        prefix: str = "probes",
        taps: list[str] | tuple[str, ...] = (),
    ) -> None:
        super().__init__(modules, taps)
        self.metrics = tuple(dict.fromkeys(DEFAULT_METRICS if metrics is None else metrics))
        self.prefix = prefix
        self._check_options()
        wanted = set(self.metrics)
        self._sums_wanted = bool(wanted & set(_FROM_TOTALS))
        self._times_forward = "forward_time_ms" in wanted
        self._measures_memory = "memory" in wanted
        self.wants_before = self._times_forward or self._measures_memory
        self._reset_results()

    def _check_options(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(
                    f"Monitor: unknown metric '{name}'.{nearest(name, METRICS)} The metrics are "
                    f"{listed(METRICS)}. For one of your own, write a probe."
                )
        if not self.metrics:
            raise ConfigError("Monitor has nothing to measure. Give metrics.")

    def _reset_results(self) -> None:
        self._lock = Lock()
        self._discard()

    def _discard(self) -> None:
        wanted = set(self.metrics)
        self._measured = False
        self._step: int | None = None  # the one that was measured
        self._sums = RunningSums(
            spread=bool(wanted & {"std", "norm"}),
            extremes=bool(wanted & {"min", "max"}),
            zeros="zeros" in wanted,
        )
        self._histograms = RunningHistograms() if "histogram" in wanted else None
        self._alive = ActiveUnits() if "dead" in wanted else None
        self._memory: dict[str, int] = {}
        self._forward = Times()

    def before(self, call: Call) -> None:
        """Read the time and memory before a module runs; called only if these are measured."""
        device = _device_of(call)
        memory = _allocated(device) if self._measures_memory else None
        call.saved = (device, memory, record_time(device))

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
        if self.wants_before:
            self._measure_cost(call, tensors)
        self._measure(call, tensors)

    def _measure_cost(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Measure the time and memory of a call; in compiled models only the output's size."""
        device, before, begin = call.saved or (None, None, None)
        if begin is not None and self._times_forward:
            self._forward.add(call.name, begin, record_time(device))
        if self._measures_memory:
            now = None if before is None or not tensors else _allocated(tensors[0].device)
            if before is None or now is None:
                size = sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
            else:
                size = now - before
            with self._lock:
                self._memory[call.name] = max(self._memory.get(call.name, 0), size)

    def _measure(self, call: Call, tensors: Sequence[Tensor]) -> None:
        name = call.name
        for position, output in enumerate(tensors):
            tensor = _measurable(output)
            if tensor is None:
                continue
            if self._sums_wanted:
                self._sums.add(name, tensor)
            if self._histograms is not None:
                self._histograms.add(name, tensor)
            if self._alive is not None:
                self._alive.add(name, position, tensor, unit_dimension(call.module, tensor))

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
                kind = "histogram" if metric == "histogram" else "scalar"
                trainer.log(f"{prefix}/{metric}", value, kind)

    def report(self) -> dict[str, dict[str, Any]]:
        """Return what was measured since the last report, by module and metric, and start over.

        This waits for the device once. Metrics without a value, such as the time of a forward that
        was compiled, are omitted, and so are modules that were not called.
        """
        names, rows = self._sums.take()
        counts = self._histograms.take() if self._histograms is not None else {}
        alive = self._alive.take() if self._alive is not None else {}
        with self._lock:
            memory, self._memory = self._memory, {}
            self._measured = False
        unread = [*map(merge_bins, counts.values()), *(one.sum() for one in alive.values())]
        read = iter(read_tensors([*rows, *unread]))

        found: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, totals in RunningSums.merge(names, islice(read, len(rows))).items():
            found[name] |= self._metrics_from_totals(totals)
        for name in counts:
            found[name]["histogram"] = describe_histogram(next(read))
        units: dict[str, tuple[float, int]] = {}
        for name, _, number in alive:
            active, total = units.get(name, (0.0, 0))
            units[name] = active + next(read), total + number
        for name, (active, total) in units.items():
            found[name]["dead"] = (total - active) / total
        for metric, values in (("forward_time_ms", self._forward.take()), ("memory", memory)):
            for name, value in values.items():
                found[name][metric] = value
        return self._sort(found)

    def _metrics_from_totals(self, totals: Totals) -> dict[str, Any]:
        if not totals.finite:
            totals = totals._replace(mean=math.nan, low=math.nan, high=math.nan)
        values = {name: _FROM_TOTALS[name](totals) for name in self.metrics if name in _FROM_TOTALS}
        if totals.finite < totals.size:
            values["nonfinite"] = totals.size - totals.finite
        return values

    def _sort(self, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the modules in the order of the model, the metrics in that of the options."""
        sites = self.attachment.sites if self.attachment is not None else {}
        metrics = (*self.metrics, "nonfinite")
        return {
            name: {metric: found[name][metric] for metric in metrics if metric in found[name]}
            for name in (*sites, *(name for name in found if name not in sites))
            if found.get(name)
        }


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
    """Return what is measured of a tensor: this rank's shard; None if it is not floating-point."""
    if not tensor.is_floating_point():
        return None
    if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    tensor = local(tensor)
    if tensor.is_nested:
        tensor = nested_values(tensor)
    return tensor if tensor.layout is torch.strided else None
