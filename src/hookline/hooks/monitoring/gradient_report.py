"""The measurements of a gradient monitor: on the device during a step, then read all at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.reading import read_tensors
from hookline.tensors.tensor_statistics import TensorStatistics

__all__ = ["OptimizerGradients", "Report", "combine_layers", "histogram", "read_report"]

Report = dict[str, dict[str, Any]]
"""By measure, then by layer: a number, or a list of them."""


class OptimizerGradients:
    """The gradients of one optimizer in one step.

    Attributes:
        names: The names of the monitored parameters that have a gradient.
        statistics: Measures their gradients.
        columns: What was measured, by name: a tensor with a row for each parameter.
        sizes: The number of elements of each gradient, where it was asked for.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        self.names: list[str] = []
        self.columns: dict[str, Tensor] = {}
        self.sizes: list[int] = []
        self._parameters: list[Tensor] = []
        self._before: TensorStatistics | None = None
        gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                gradient = None if name is None else parameter.grad
                if name is not None and gradient is not None and parameter.requires_grad:
                    self.names.append(name)
                    self._parameters.append(parameter)
                    gradients.append(gradient)
        self.statistics = TensorStatistics(gradients)

    def keep_weights(self) -> None:
        """Copy the weights before the optimizer's step."""
        copies = [parameter.detach().clone() for parameter in self._parameters]
        self._before = TensorStatistics(copies)

    @torch.no_grad()
    def measure_update(self) -> None:
        """Measure how the weights have changed, if they were copied."""
        before, self._before = self._before, None
        if before is None:
            return
        self.columns["weight"] = before.norms()
        after = TensorStatistics([parameter.detach() for parameter in self._parameters])
        subtract = torch._foreach_sub_  # pyright: ignore[reportPrivateImportUsage]
        subtract(before.local, after.local)  # in the copies
        self.columns["change"] = before.norms()


def read_report(measured: Sequence[OptimizerGradients]) -> Report:
    """Return the measures of all optimizers, copied to the host with one transfer."""
    columns = (column for gradients in measured for column in gradients.columns.values())
    values = iter(read_tensors(columns))
    report: Report = {}
    for gradients in measured:
        for measure in gradients.columns:
            rows = zip(gradients.names, next(values), strict=True)
            report.setdefault(measure, {}).update(rows)
        if gradients.sizes and gradients.columns:
            sizes = zip(gradients.names, gradients.sizes, strict=True)
            report.setdefault("size", {}).update(sizes)
    return report


def combine_layers(report: Report) -> dict[str, float]:
    """Return the measures of all layers together, without percentiles and histograms."""
    total: dict[str, float] = {
        measure: math.hypot(*report[measure].values())
        for measure in ("norm", "weight", "change")
        if measure in report
    }
    if "finite" in report:
        counts, means = report["finite"], report["mean"]
        finite = sum(counts.values())
        mean = math.fsum(means[name] * count for name, count in counts.items()) / max(finite, 1)
        squares = math.fsum(
            (report["std"][name] ** 2 + (means[name] - mean) ** 2) * count
            for name, count in counts.items()
        )
        total |= {"finite": finite, "mean": mean, "std": math.sqrt(squares / max(finite, 1))}
        total["largest"] = max(report["largest"].values())
        total["zeros"] = sum(report["zeros"].values())
        total["size"] = sum(report["size"].values())
    return total


def histogram(counts: Sequence[float], largest: float) -> dict[str, Any]:
    """Return counts with the edges of their bins, from minus to plus the largest magnitude."""
    largest = largest or 0.5  # if all values are zero the bins still need a width
    width = 2 * largest / len(counts)
    edges = [width * i - largest for i in range(len(counts))]
    return {"counts": [int(count) for count in counts], "edges": [*edges, largest]}
