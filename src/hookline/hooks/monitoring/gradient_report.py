"""What a gradient monitor has measured: on the device during a step, then read all at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.hooks.monitoring.gradient_statistics import Parts, wide

__all__ = ["Report", "Turn", "histogram", "read", "total"]

Report = dict[str, dict[str, Any]]
"""By measure, then by layer: a number, or a list of them."""


class Turn:
    """The gradients of one optimizer in one step.

    Attributes:
        names: The layers.
        parts: Their gradients.
        columns: What was measured, by name: a tensor with a row for each layer.
        sizes: How many elements each gradient has, where that is asked for.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        self.names: list[str] = []
        self.columns: dict[str, Tensor] = {}
        self.sizes: list[int] = []
        self._parameters: list[Tensor] = []
        self._before: Parts | None = None
        gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                gradient = None if name is None else parameter.grad
                if name is not None and gradient is not None and parameter.requires_grad:
                    self.names.append(name)
                    self._parameters.append(parameter)
                    gradients.append(gradient)
        self.parts = Parts(gradients)

    def keep_weights(self) -> None:
        """Remember the weights as they are before the optimizer's step."""
        self._before = Parts([parameter.detach().clone() for parameter in self._parameters])

    @torch.no_grad()
    def measure_update(self) -> None:
        """Measure how the weights have changed, if they were kept."""
        before, self._before = self._before, None
        if before is None:
            return
        self.columns["weight"] = before.norms()
        after = Parts([parameter.detach() for parameter in self._parameters])
        subtract = torch._foreach_sub_  # pyright: ignore[reportPrivateImportUsage]
        subtract(before.local, after.local)  # in the copies
        self.columns["change"] = before.norms()


def read(turns: Sequence[Turn]) -> Report:
    """Bring the measures of all turns to the host, by one transfer."""
    columns = [column for turn in turns for column in turn.columns.values()]
    if not columns:  # updates alone were to be measured, and the step was skipped
        return {}
    kinds = {(column.device, column.dtype) for column in columns}
    if len(kinds) > 1:
        home = columns[0].device
        columns = [column.to(home, wide(home)) for column in columns]
    flat: list[float] = torch.cat([column.reshape(-1) for column in columns]).tolist()
    report: Report = {}
    at = 0
    for turn in turns:
        for measure, column in turn.columns.items():
            rows: list[Any] = flat[at : at + column.numel()]
            at += len(rows)
            if column.ndim > 1:
                width = column.shape[1]
                rows = [rows[i : i + width] for i in range(0, len(rows), width)]
            report.setdefault(measure, {}).update(zip(turn.names, rows, strict=True))
        if turn.sizes:
            report.setdefault("size", {}).update(zip(turn.names, turn.sizes, strict=True))
    return report


def total(report: Report) -> dict[str, float]:
    """The measures of all layers together; percentiles and histograms do not add up."""
    whole: dict[str, float] = {
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
        whole |= {"finite": finite, "mean": mean, "std": math.sqrt(squares / max(finite, 1))}
        whole["largest"] = max(report["largest"].values())
        whole["zeros"] = sum(report["zeros"].values())
        whole["size"] = sum(report["size"].values())
    return whole


def histogram(counts: Sequence[float], largest: float) -> dict[str, Any]:
    """Return counts with the edges of their bins, from minus to plus the largest magnitude."""
    largest = largest or 0.5  # all zeros: the bins have some width all the same
    width = 2 * largest / len(counts)
    edges = [width * i - largest for i in range(len(counts))]
    return {"counts": [int(count) for count in counts], "edges": [*edges, largest]}
