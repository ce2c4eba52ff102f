"""OptimizerMonitor: logs what the optimizer makes of the gradients, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from hookline.errors import ConfigError, HookConfigError
from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.tensors.parameter_names import named_parameters
from hookline.tensors.reading import read_tensors
from hookline.tensors.sharded import local
from hookline.tensors.tensor_statistics import Columns, TensorStatistics, merge_ranks

__all__ = ["OptimizerMonitor"]


class OptimizerMonitor(BuiltIn):
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
    with the gradient that the step used, and the second moment after the step, without the bias of
    its first steps; second moments below ε² count as ε². It is there for optimizers that keep a
    second moment per element (`Adam`, `AdamW`, `NAdam`, `RAdam`, `RMSprop`). For plain SGD
    `effective_lr` is the learning rate.

    Sharded parameters are measured as a whole. Skipped steps and parameters without a gradient are
    not reported, and a ratio is omitted where what it is divided by is zero.

    Args:
        log_frequency: report every N optimizer steps.
        param_filter: monitor only parameters that match one of these, as in `GradientMonitor`.
        rms_ratio: log `rms_ratio`.
        updates: log `update_ratio` and `effective_lr`.
    """

    cost = (
        "Nothing in steps without a report. A report takes about five passes over the monitored "
        "parameters, keeps a copy of their weights during the step, and waits for the device once; "
        "for sharded parameters it is one collective."
    )
    hookline_group = HookGroup.MONITOR
    hookline_records = True

    def __init__(
        self,
        log_frequency: PositiveInt = 50,
        param_filter: list[str] | None = None,
        *,
        rms_ratio: bool = True,
        updates: bool = True,
    ) -> None:
        if not (rms_ratio or updates):
            raise ConfigError(
                "OptimizerMonitor has nothing to report: rms_ratio and updates are off. Turn one "
                "of them on, or remove the hook."
            )
        self.log_frequency = log_frequency
        self.param_filter = param_filter
        self.rms_ratio = rms_ratio
        self.updates = updates
        self._names: dict[int, str] | None = None
        self._steps: dict[int, _OptimizerStep] = {}

    def on_train_start(self, model: torch.nn.Module) -> None:
        """Find the parameters to monitor; raise an error that ends training if there are none."""
        self._steps.clear()
        try:
            self._names = named_parameters(model, self.param_filter)
        except ConfigError as error:
            raise HookConfigError(f"OptimizerMonitor: param_filter: {error}") from None

    def on_before_optimizer_step(
        self, step: int, optimizer_idx: int, optimizers: list[Any], model: torch.nn.Module
    ) -> None:
        """Copy the weights that the step is going to change."""
        if (step + 1) % self.log_frequency:
            return
        if self._names is None:  # the hook was added during training
            self._names = {}  # if the next call fails, it is reported once
            self._names = named_parameters(model, self.param_filter)
        started = _OptimizerStep(optimizers[optimizer_idx], self._names)
        if started.names:
            self._steps[optimizer_idx] = started
            if self.updates:
                started.keep_weights()

    def on_step_skipped(self, optimizer_idx: int) -> None:
        """Forget a step that was not made."""
        self._steps.pop(optimizer_idx, None)

    def on_after_optimizer_step(self, optimizer_idx: int) -> None:
        """Measure the step, without waiting for the device."""
        made = self._steps.get(optimizer_idx) if self._steps else None
        if made is not None:
            made.measure(rms_ratio=self.rms_ratio)

    def on_step_end(self, trainer: Any) -> None:
        """Read all measurements at once, and log them."""
        if not self._steps:
            return
        steps = [step for step in self._steps.values() if step.columns]
        self._steps.clear()
        merge_ranks([(step.statistics, step.columns) for step in steps])
        values = iter(read_tensors(column for step in steps for column in step.columns.values()))
        total: dict[str, float] = {}
        for step in steps:
            columns = {name: next(values) for name in step.columns}
            for row, layer in enumerate(step.names):
                norms = {name: column[row] for name, column in columns.items()}
                if "ratio" in norms and row in step.has_moment:
                    norms["size"] = math.sqrt(step.sizes[row])
                else:
                    norms.pop("ratio", None)
                for name, norm in norms.items():
                    total[name] = math.hypot(total.get(name, 0.0), norm)
                for measure, value in _ratios(norms):
                    trainer.log(f"optimizer/{layer}/{measure}", value)
        for measure, value in _ratios(total):
            trainer.log(f"optimizer/total/{measure}", value)


def _ratios(norms: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the measures that these norms give."""
    if "ratio" in norms:
        yield "rms_ratio", norms["ratio"] / norms["size"]
    if norms.get("weight"):
        yield "update_ratio", norms["change"] / norms["weight"]
    if "change" in norms and norms["gradient"]:
        yield "effective_lr", norms["change"] / norms["gradient"]


class _OptimizerStep:
    """One step of one optimizer, and the norms that were measured of it.

    A column has a row for each of `names`, the monitored parameters that have a gradient.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        self.names: list[str] = []
        self.columns: Columns = {}
        self.has_moment: set[int] = set()
        self._optimizer = optimizer
        self._parameters: list[Tensor] = []
        self._groups: list[Any] = []
        self._before: TensorStatistics | None = None
        gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                gradient = None if name is None else parameter.grad
                if name is not None and gradient is not None and parameter.requires_grad:
                    self.names.append(name)
                    self._parameters.append(parameter)
                    self._groups.append(group)
                    gradients.append(gradient)
        self.statistics = TensorStatistics(gradients)
        self.sizes = self.statistics.sizes()

    def keep_weights(self) -> None:
        """Copy the weights before the optimizer's step."""
        copies = [parameter.detach().clone() for parameter in self._parameters]
        self._before = TensorStatistics(copies)

    @torch.no_grad()
    def measure(self, *, rms_ratio: bool) -> None:
        """Measure the change of the weights and the ratios, after the optimizer's step."""
        before, self._before = self._before, None
        if before is not None:
            self.columns["gradient"] = self.statistics.norms()
            self.columns["weight"] = before.norms()
            after = TensorStatistics([parameter.detach() for parameter in self._parameters])
            subtract = torch._foreach_sub_  # pyright: ignore[reportPrivateImportUsage]
            subtract(before.local, after.local)  # in the copies
            self.columns["change"] = before.norms()
        if rms_ratio:
            norms = [self._ratio_norm(row) for row in range(len(self.names))]
            self.has_moment = {row for row, norm in enumerate(norms) if norm is not None}
            if self.has_moment:
                home = self.statistics.home
                zero = torch.zeros((), device=home)
                found = [zero if norm is None else norm.to(home) for norm in norms]
                self.columns["ratio"] = torch.stack(found)

    def _ratio_norm(self, row: int) -> Tensor | None:
        """Return the norm of g / √v in this rank's part; None without a second moment."""
        parameter, group = self._parameters[row], self._groups[row]
        state = self._optimizer.state.get(parameter, {})
        moment = state.get("exp_avg_sq", state.get("square_avg"))
        gradient = parameter.grad
        if not isinstance(moment, Tensor) or moment.shape != parameter.shape or gradient is None:
            return None
        if gradient.layout is not torch.strided or gradient.is_complex():
            return None
        second, used = local(moment).float(), self.statistics.local[row].float()
        if "exp_avg_sq" in state and "betas" in group and "step" in state:
            second = second / (1 - float(group["betas"][1]) ** state["step"])
        epsilon = float(group.get("eps", 1e-8))
        divisor = second.clamp(min=max(epsilon**2, torch.finfo(torch.float32).tiny)).sqrt_()
        norm: Tensor = torch.linalg.vector_norm(used / divisor)
        return norm
