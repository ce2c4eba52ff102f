"""GradientMonitor: how large gradients are, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt

from hookline.errors import ConfigError
from hookline.hook import Rank
from hookline.hooks.monitoring.gradient_report import Report, Turn, histogram, read, total
from hookline.hooks.monitoring.gradient_statistics import histograms, percentiles, statistics
from hookline.options import BuiltIn
from hookline.tensors.parameter_names import named_parameters

__all__ = ["GradientMonitor"]

log = logging.getLogger("hookline")

Percentile = Annotated[float, Field(ge=0, le=100)]
_NAMED = 8  # so many layers are named in a warning


class GradientMonitor(BuiltIn):
    """Reports how large gradients are, for each parameter and in total.

    Gradients are read when they are complete: accumulated, unscaled, not yet clipped. Values are
    logged as `gradients/<parameter>/norm` and `gradients/total/norm`; a full report adds `mean`,
    `std`, `abs_max`, `zeros` (the share of elements that are zero), `nonfinite` (how many elements
    are NaN or infinite; the other statistics leave these out), `histogram` and `p<percentile>`.
    The total is that of all parameters that are monitored. Parameters that are frozen, or have no
    gradient, are left out.

    Percentiles are estimates: they are interpolated between two values of the gradient, each known
    to 1 %, or to one ten-millionth of the largest magnitude where that is more.

    Layers whose gradients vanish or explode are named in a warning, once until they recover.

    Args:
        log_frequency: report in each N-th optimizer step.
        log_norm: report norms.
        log_histogram: report histograms, between minus and plus the largest magnitude.
        percentiles: which percentiles to report, from 0 to 100.
        param_filter: monitor only parameters that one of these matches. Each is a part of a name;
            if no name has that part, a glob (`*.weight`); if it matches none either, a regular
            expression.
        log_statistics: report mean, deviation, largest magnitude, zeros and non-finite elements;
            None: when histograms or percentiles are reported.
        bins: how many bins a histogram has.
        update_ratio: report `update_ratio`, the norm of what the optimizer's step changed over
            the norm that the weights had before; weights that are all zero are left out.
        vanishing: warn of layers whose norm is below this; None for no warning.
        exploding: warn of layers whose norm is above this, or not finite; None for no warning.
    """

    cost = (
        "Nothing in steps without a report. In a report, one pass over the gradients (a full one "
        "about twenty) and one wait for the device; `update_ratio` keeps a copy of the monitored "
        "weights during the step."
    )
    hookline_rank = Rank.MONITOR

    def __init__(
        self,
        log_frequency: PositiveInt = 100,
        log_norm: bool = True,
        log_histogram: bool = False,
        percentiles: list[Percentile] | None = None,
        param_filter: list[str] | None = None,
        *,
        log_statistics: bool | None = None,
        bins: PositiveInt = 64,
        update_ratio: bool = False,
        vanishing: PositiveFloat | None = 1e-7,
        exploding: PositiveFloat | None = 1e3,
    ) -> None:
        self.log_frequency = log_frequency
        self.log_norm = log_norm
        self.log_histogram = log_histogram
        self.percentiles = list(percentiles or ())
        self.param_filter = param_filter
        full = log_histogram or bool(self.percentiles)
        self.log_statistics = full if log_statistics is None else log_statistics
        self.bins = bins
        self.update_ratio = update_ratio
        self.vanishing = vanishing
        self.exploding = exploding
        warns = vanishing is not None or exploding is not None
        self._needs_norms = log_norm or warns
        self._needs_statistics = full or self.log_statistics
        if not (self._needs_norms or self._needs_statistics or update_ratio):
            raise ConfigError(
                "GradientMonitor has nothing to report: log_norm, log_histogram, log_statistics, "
                "update_ratio, percentiles and both warnings are off. Switch one of them on, or "
                "leave the hook out."
            )
        self._names: dict[int, str] | None = None
        self._turns: dict[int, Turn] = {}
        self._vanished: set[str] = set()
        self._exploded: set[str] = set()

    def on_train_start(self, model: torch.nn.Module) -> None:
        """Find the parameters to monitor."""
        self._names = None  # also when what comes next fails
        self._turns.clear()
        self._names = named_parameters(model, self.param_filter)

    def on_gradients_ready(
        self, step: int, optimizer_idx: int, optimizers: list[Any], model: torch.nn.Module
    ) -> None:
        """Measure the gradients of one optimizer; nothing is read yet."""
        if (step + 1) % self.log_frequency:
            return
        if self._names is None:  # added while training
            self._names = named_parameters(model, self.param_filter)
        turn = Turn(optimizers[optimizer_idx], self._names)
        if turn.names:
            self._turns[optimizer_idx] = turn
            self._measure(turn)

    def on_before_optimizer_step(self, optimizer_idx: int) -> None:
        """Keep the weights, where their change is asked for."""
        if self._turns and self.update_ratio and optimizer_idx in self._turns:
            self._turns[optimizer_idx].keep_weights()

    def on_after_optimizer_step(self, optimizer_idx: int) -> None:
        """Measure how the weights have changed."""
        if self._turns and optimizer_idx in self._turns:
            self._turns[optimizer_idx].measure_update()

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Read what was measured, all at once, and report it."""
        if not self._turns:
            return
        turns = list(self._turns.values())
        self._turns.clear()
        report = read(turns)
        for layer, measure, value in self._numbers(report):
            trainer.log(f"gradients/{layer}/{measure}", value)
        for layer, counts in report.get("counts", {}).items():
            shape = histogram(counts, report["largest"][layer])
            trainer.log(f"gradients/{layer}/histogram", shape, "histogram")
        if self._needs_norms:
            self._warn(step, report["norm"])

    def _measure(self, turn: Turn) -> None:
        parts, columns = turn.parts, turn.columns
        if self._needs_norms:
            columns["norm"] = parts.norms()
        if self._needs_statistics:
            turn.sizes = parts.sizes()
            found = statistics(parts)
            columns.update(vars(found))
            if self.log_histogram:
                columns["counts"] = histograms(parts, found.largest, self.bins)
            if self.percentiles:
                columns["percentiles"] = percentiles(
                    parts, found.finite, found.largest, self.percentiles
                )

    def _numbers(self, report: Report) -> Iterator[tuple[str, str, float]]:
        """What to log: layer, measure, value."""
        whole = total(report)
        if self.log_norm:
            for layer, norm in report["norm"].items():
                yield layer, "norm", norm
            yield "total", "norm", whole["norm"]
        if self.log_statistics:
            for layer in report["size"]:
                own = {measure: report[measure][layer] for measure in _STATISTICS}
                yield from _statistics_of(layer, own)
            yield from _statistics_of("total", whole)
        for layer, values in report.get("percentiles", {}).items():
            for percentile, value in zip(self.percentiles, values, strict=True):
                yield layer, f"p{percentile:g}", value
        if "change" in report:
            for layer, weight in (*report["weight"].items(), ("total", whole["weight"])):
                change = whole["change"] if layer == "total" else report["change"][layer]
                if weight:
                    yield layer, "update_ratio", change / weight

    def _warn(self, step: int, norms: dict[str, float]) -> None:
        if self.vanishing is not None:
            small = {name: norm for name, norm in norms.items() if norm < self.vanishing}
            _warn_of_new(small, self._vanished, norms, f"vanish, below {self.vanishing:g}", step)
        if self.exploding is not None:
            large = {name: norm for name, norm in norms.items() if not norm <= self.exploding}
            _warn_of_new(large, self._exploded, norms, f"explode, above {self.exploding:g}", step)


_STATISTICS = ("size", "finite", "mean", "std", "largest", "zeros")


def _statistics_of(layer: str, own: dict[str, float]) -> Iterator[tuple[str, str, float]]:
    yield layer, "nonfinite", own["size"] - own["finite"]
    if own["finite"]:
        yield layer, "mean", own["mean"]
        yield layer, "std", own["std"]
        yield layer, "abs_max", own["largest"]
        yield layer, "zeros", own["zeros"] / own["size"]


def _warn_of_new(
    found: dict[str, float], known: set[str], seen: Iterable[str], what: str, step: int
) -> None:
    """Warn of layers that are found and not known; those that were seen well are forgotten."""
    new = [name for name in found if name not in known]
    known.difference_update(name for name in seen if name not in found)
    known.update(new)
    if new:
        shown = ", ".join(f"'{name}' ({found[name]:.3g})" for name in new[:_NAMED])
        more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        log.warning("Step %s: gradients %s: %s%s.", step, what, shown, more)
