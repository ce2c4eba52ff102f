"""GradientMonitor: logs the size of gradients, layer by layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt

from hookline.errors import ConfigError
from hookline.hooks.monitoring.monitor_bases import (
    MonitoredParameters,
    ParameterMonitor,
    read_columns,
)
from hookline.loop.processes import is_main_process
from hookline.tensors.histograms import describe_histogram, estimate_percentiles, merge_bins
from hookline.text_tables import join_some

log = logging.getLogger("hookline")

Percentile = Annotated[float, Field(ge=0, le=100)]
_MAX_NAMED = 8  # layers named in one warning

Report = dict[str, dict[str, Any]]
"""By measure, then by layer: a number, or a list of them."""


class GradientMonitor(ParameterMonitor):
    """Logs the size of gradients, for each parameter and in total.

    Gradients are measured when they are complete: accumulated, unscaled, not yet clipped. The norms
    are logged as `gradients/<parameter>/norm` and, for all monitored parameters together,
    `gradients/total/norm`. A full report adds `mean`, `std`, `abs_max`, `zeros` (the fraction of
    elements that are zero), `nonfinite` (the number of elements that are NaN or infinite; the other
    statistics exclude them), `histogram` and `p<percentile>`.

    Histograms have bins on a logarithmic scale, four for each doubling of the magnitude.
    Percentiles are estimates, exact to 2 %. Both count magnitudes below 2**-64 as zero.

    A warning names the layers whose gradients vanish, explode or are not finite, and again only
    after a gradient has recovered.

    Args:
        every: report every N optimizer steps.
        log_norm: log norms.
        log_histogram: log histograms.
        percentiles: the percentiles to log, from 0 to 100.
        param_filter: monitor only parameters that match one of these. Each is a substring of a
            name; if no name contains it, a glob (`*.weight`); if that matches none either, a
            regular expression.
        log_statistics: log mean, standard deviation, largest magnitude, zeros and nonfinite
            elements; None: if histograms or percentiles are logged.
        vanishing: warn about layers whose norm is below this; None: no warning.
        exploding: warn about layers whose norm is above this or not finite; None: no warning.
    """

    cost = (
        "Only for a report: one pass over the gradients (a full one about twenty), and one wait "
        "for the device; for sharded gradients one collective, or two with histograms or "
        "percentiles."
    )

    def __init__(
        self,
        every: PositiveInt = 100,
        log_norm: bool = True,
        log_histogram: bool = False,
        percentiles: list[Percentile] | None = None,
        param_filter: list[str] | None = None,
        *,
        log_statistics: bool | None = None,
        vanishing: PositiveFloat | None = 1e-7,
        exploding: PositiveFloat | None = 1e3,
    ) -> None:
        super().__init__(every, param_filter)
        self.log_norm = log_norm
        self.log_histogram = log_histogram
        self.percentiles = list(percentiles or ())
        full = log_histogram or bool(self.percentiles)
        self.log_statistics = full if log_statistics is None else log_statistics
        self.vanishing = vanishing
        self.exploding = exploding
        warns = vanishing is not None or exploding is not None
        self._needs_norms = log_norm or warns
        if not (self._needs_norms or full or self.log_statistics):
            raise ConfigError(
                "GradientMonitor has nothing to report: set one of its options, or remove it."
            )
        self._step = 0  # that is measured: a step that is skipped does not count in `on_step_end`
        self._warned: dict[str, str] = {}  # the problem of each layer in the last report

    def on_gradients_ready(
        self, step: int, optimizer_idx: int, optimizers: list[Any], model: torch.nn.Module
    ) -> None:
        """Measure the gradients of one optimizer, without waiting for the device."""
        if (step + 1) % self.every:
            return
        self._step = step + 1
        gradients = MonitoredParameters(optimizers[optimizer_idx], self.names_in(model))
        if gradients.names:
            self._measured[optimizer_idx] = gradients
            self._measure(gradients)

    def on_step_end(self, trainer: Any) -> None:
        if not self._measured:
            return
        measured = list(self._measured.values())
        self._measured.clear()
        report = _read_report(measured)
        for layer, measure, value in self._numbers(report):
            trainer.log(f"gradients/{layer}/{measure}", value)
        for layer, counts in report.get("counts", {}).items():
            trainer.log(f"gradients/{layer}/histogram", describe_histogram(counts), "histogram")
        if self._needs_norms and is_main_process():  # all ranks have the same gradients
            self._warn(self._step, report["norm"])

    def _measure(self, gradients: MonitoredParameters) -> None:
        statistics, columns = gradients.statistics, gradients.columns
        if self._needs_norms:
            columns["norm"] = statistics.norms()
        if self.log_statistics:
            columns.update(statistics.moments())
        if self.log_histogram or self.percentiles:
            counts = statistics.counts()
            if self.log_histogram:
                gradients.merged["counts"] = merge_bins(counts)
            if self.percentiles:
                gradients.merged["percentiles"] = estimate_percentiles(counts, self.percentiles)

    def _numbers(self, report: Report) -> Iterator[tuple[str, str, float]]:
        total = _combine_layers(report)
        if self.log_norm:
            for layer, norm in report["norm"].items():
                yield layer, "norm", norm
            yield "total", "norm", total["norm"]
        if self.log_statistics:
            for layer in report["size"]:
                values = {measure: report[measure][layer] for measure in _STATISTICS}
                yield from _statistics_of(layer, values)
            yield from _statistics_of("total", total)
        for layer, values in report.get("percentiles", {}).items():
            for percentile, value in zip(self.percentiles, values, strict=True):
                yield layer, f"p{percentile:g}", value

    def _warn(self, step: int, norms: dict[str, float]) -> None:
        """Warn about layers that have a problem since this report."""
        new: dict[str, list[str]] = {}
        for name, norm in norms.items():
            problem = self._problem_of(norm)
            if problem and self._warned.get(name) != problem:
                new.setdefault(problem, []).append(f"'{name}' ({norm:.3g})")
            self._warned[name] = problem
        for problem, layers in new.items():
            log.warning("Step %s: gradients %s: %s.", step, problem, join_some(layers, _MAX_NAMED))

    def _problem_of(self, norm: float) -> str:
        if self.exploding is not None and not math.isfinite(norm):
            return "are not finite"
        if self.exploding is not None and norm > self.exploding:
            return f"explode, above {self.exploding:g}"
        if self.vanishing is not None and norm < self.vanishing:
            return f"vanish, below {self.vanishing:g}"
        return ""


_STATISTICS = ("size", "finite", "mean", "std", "largest", "zeros")


def _statistics_of(layer: str, values: dict[str, float]) -> Iterator[tuple[str, str, float]]:
    yield layer, "nonfinite", values["size"] - values["finite"]
    if values["finite"]:
        yield layer, "mean", values["mean"]
        yield layer, "std", values["std"]
        yield layer, "abs_max", values["largest"]
        yield layer, "zeros", values["zeros"] / values["size"]


def _read_report(measured: Sequence[MonitoredParameters]) -> Report:
    """Return the measures of all optimizers."""
    report: Report = {}
    for gradients, columns in zip(measured, read_columns(measured), strict=True):
        for measure, values in {**columns, "size": gradients.sizes}.items():
            rows = zip(gradients.names, values, strict=True)
            report.setdefault(measure, {}).update(rows)
    if "squares" in report:
        finite = report["finite"]
        report["std"] = {
            name: math.sqrt(squares / max(finite[name], 1))
            for name, squares in report.pop("squares").items()
        }
    return report


def _combine_layers(report: Report) -> dict[str, float]:
    """Return the measures of all layers together, without percentiles and histograms."""
    total: dict[str, float] = {}
    if "norm" in report:
        total["norm"] = math.hypot(*report["norm"].values())
    if "finite" in report:
        counts, means = report["finite"], report["mean"]
        finite = sum(counts.values())
        mean = math.fsum(means[name] * count for name, count in counts.items()) / max(finite, 1)
        squares = math.fsum(
            (report["std"][name] ** 2 + (means[name] - mean) ** 2) * count
            for name, count in counts.items()
        )
        total |= {"finite": finite, "mean": mean, "std": math.sqrt(squares / max(finite, 1))}
        total |= {measure: sum(report[measure].values()) for measure in ("zeros", "size")}
        total["largest"] = max(report["largest"].values())
    return total
