"""OptimizerMonitor: logs what the optimizer makes of the gradients, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from hookline.hooks.monitoring.monitor_bases import (
    MonitoredParameters,
    ParameterMonitor,
    read_columns,
)
from hookline.tensors.sharded import local


class OptimizerMonitor(ParameterMonitor):
    """Logs how the optimizer's step relates to gradients, second moments and weights.

    The values are `optimizer/<parameter>/<measure>`, and `optimizer/total/<measure>` for all
    monitored parameters together:

    | measure | meaning |
    |---|---|
    | `rms_ratio` | √mean(g² / v): the gradient relative to the second moment that Adam keeps |
    | `update_ratio` | the norm of the step's change, divided by the norm of the weights before it |
    | `effective_lr` | the norm of the step's change, divided by the norm of the gradient |

    `rms_ratio` is about 1 while the second moment follows the gradient, and rises when it has
    become too small for it, often some steps before a loss spike (arXiv 2304.13013). It is computed
    for optimizers that keep a second moment per element (`Adam`, `AdamW`, `NAdam`, `RAdam`,
    `RMSprop`; with `amsgrad`, the largest so far), from the gradient that the step used and the
    bias-corrected second moment after it, with at least ε². Sparse and complex gradients have none.
    For plain SGD `effective_lr` is the learning rate.

    Skipped steps and parameters without a gradient are not reported, and a ratio is omitted where
    its divisor is zero.

    Args:
        every: report every N optimizer steps.
        param_filter: monitor only parameters that match one of these, as in `GradientMonitor`.
    """

    cost = (
        "Only for a report: about five passes over the monitored parameters, a copy of their "
        "weights during the step, and one wait for the device; for sharded parameters one "
        "collective."
    )

    def __init__(
        self,
        every: PositiveInt = 50,
        param_filter: list[str] | None = None,
    ) -> None:
        super().__init__(every, param_filter)
        self._step: int | None = None

    def on_before_optimizer_step(
        self, step: int, optimizer_idx: int, optimizers: list[Any], model: torch.nn.Module
    ) -> None:
        """Copy the weights that the step is going to change."""
        if (step + 1) % self.every:
            return
        if self._step != step:
            self._measured.clear()
            self._step = step
        started = _OptimizerStep(optimizers[optimizer_idx], self.names_in(model))
        if started.names:
            self._measured[optimizer_idx] = started
            started.keep_weights()

    def on_step_skipped(self, optimizer_idx: int) -> None:
        self._measured.pop(optimizer_idx, None)

    def on_after_optimizer_step(self, optimizer_idx: int) -> None:
        made: _OptimizerStep | None = self._measured.get(optimizer_idx) if self._measured else None
        if made is not None:
            made.measure()

    def on_step_end(self, trainer: Any, step: int) -> None:
        if not self._measured:
            return
        steps: list[_OptimizerStep] = [one for one in self._measured.values() if one.columns]
        self._measured.clear()
        if self._step not in (step - 1, step):  # the hook was disabled within an earlier step
            return
        total: dict[str, float] = {}
        for one, columns in zip(steps, read_columns(steps), strict=True):
            for row, layer in enumerate(one.names):
                norms = {name: column[row] for name, column in columns.items()}
                if "ratio" in norms and row in one.has_moment:
                    norms["size"] = math.sqrt(one.sizes[row])
                else:
                    norms.pop("ratio", None)
                for name, norm in norms.items():
                    total[name] = math.hypot(total.get(name, 0.0), norm)
                for measure, value in _ratios(norms):
                    trainer.log(f"optimizer/{layer}/{measure}", value)
        for measure, value in _ratios(total):
            trainer.log(f"optimizer/total/{measure}", value)


def _ratios(norms: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    if "ratio" in norms:
        yield "rms_ratio", norms["ratio"] / norms["size"]
    if norms.get("weight"):
        yield "update_ratio", norms["change"] / norms["weight"]
    if "change" in norms and norms["gradient"]:
        yield "effective_lr", norms["change"] / norms["gradient"]


class _OptimizerStep(MonitoredParameters):
    """One step of one optimizer, and the norms that were measured of it."""

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        super().__init__(optimizer, names)
        self.has_moment: set[int] = set()
        self._optimizer = optimizer

    @torch.no_grad()
    def measure(self) -> None:
        """Measure the change of the weights and the ratios, after the optimizer's step."""
        self.columns["gradient"] = self.statistics.norms()
        self.measure_change()
        norms = [self._ratio_norm(row) for row in range(len(self.names))]
        self.has_moment = {row for row, norm in enumerate(norms) if norm is not None}
        if self.has_moment:
            home = self.statistics.home
            zero = torch.zeros((), device=home)
            found = [zero if norm is None else norm.to(home) for norm in norms]
            self.columns["ratio"] = torch.stack(found)

    def _ratio_norm(self, row: int) -> Tensor | None:
        """Return the norm of g / √v in this rank's shard; None without a second moment."""
        parameter, group = self.parameters[row], self.groups[row]
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided or gradient.is_complex():
            return None
        second = _second_moment(self._optimizer.state.get(parameter, {}), parameter, group)
        if second is None or not self.sizes[row]:
            return None
        epsilon = group.get("eps", 1e-8)  # Adafactor has several
        least = float(epsilon) ** 2 if isinstance(epsilon, int | float) else 0.0
        divisor = second.clamp(min=max(least, torch.finfo(torch.float32).tiny)).sqrt_()
        norm: Tensor = torch.linalg.vector_norm(self.statistics.local[row].float() / divisor)
        return norm


def _second_moment(
    state: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]
) -> Tensor | None:
    """Return the mean of squared gradients that an optimizer keeps for each element.

    The bias of its first steps is removed. With `amsgrad` it is the largest so far, by which the
    step is divided. Of a sharded one it is this rank's shard.
    """
    names = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")
    name = next((name for name in names if name in state), None)
    moment = None if name is None else state[name]
    if not isinstance(moment, Tensor) or moment.shape != parameter.shape:
        return None
    if not moment.is_floating_point():  # such as one that is quantized
        return None
    second = local(moment).float()
    if name != "square_avg" and "betas" in group and "step" in state:
        second = second / (1 - group["betas"][1] ** state["step"])
    return second
