"""The bases of hooks that measure training and log what they find: of modules, of parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookline.errors import ConfigError, HookConfigError, listed
from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.probes.call import Call
from hookline.probes.probe import Probe
from hookline.tensors.device_numbers import read_tensors
from hookline.tensors.parameter_names import named_parameters
from hookline.tensors.statistics import Columns, TensorStatistics, merge_ranks

log = logging.getLogger("hookline")


class TrainingMonitor(BuiltIn):
    """Measures training, and logs the values."""

    hookline_group = HookGroup.MONITOR
    hookline_records = True


def parameters_of(optimizers: Sequence[Any]) -> list[Tensor]:
    """Return the parameters of all optimizers."""
    return [p for one in optimizers for group in one.param_groups for p in group["params"]]


class ModuleMonitor(TrainingMonitor, Probe):
    """Measures a module's first call in a step, and logs the values when the step ends.

    A subclass measures in `before` or `after` the calls that are due (`is_due`), without waiting
    for the device, and stores the values in `_measured`, or the module's name in `_unseen`.
    """

    wants_input = False
    every_name = "log_frequency"
    prefix: ClassVar[str] = ""
    every: int = 1
    _results: ClassVar[tuple[str, ...]] = ("_measured", "_step", "_unseen", "_warned")

    def _reset_results(self) -> None:
        self._measured: dict[str, Mapping[str, Tensor]] = {}
        self._step: int | None = None
        self._unseen: dict[str, None] = {}
        self._warned = False

    def is_due(self, call: Call) -> bool:
        """Return whether a call is measured; forget those of an earlier step."""
        if call.step is not None and (call.step + 1) % self.every:
            return False
        if call.step != self._step:
            self._measured, self._step = {}, call.step
        return call.name not in self._measured

    def on_train_start(self) -> None:
        self._reset_results()

    def on_step_end(self, trainer: Any, step: int) -> None:
        if self._unseen and not self._warned:
            self._warned = True
            log.warning("%s", self._describe_unseen(listed(self._unseen)))
        if self._step not in (step - 1, step):  # a skipped step does not count
            self._measured = {}
        for module, values in self.report().items():
            prefix = f"{self.prefix}/{module}" if module else self.prefix
            for measure, value in values.items():
                trainer.log(f"{prefix}/{measure}", value)

    def report(self) -> dict[str, dict[str, float]]:
        """Return what was measured since the last report, by module and measure."""
        if not self._measured:
            return {}
        measured, self._measured = self._measured, {}
        values = iter(read_tensors(v for several in measured.values() for v in several.values()))
        return {
            module: self._summarize({name: next(values) for name in several})
            for module, several in measured.items()
        }

    def _summarize(self, values: dict[str, Any]) -> dict[str, float]:
        """Return the numbers to log of a module, from what was measured of it."""
        return values

    def _describe_unseen(self, modules: str) -> str:
        """Return the warning about modules that could not be measured."""
        raise NotImplementedError


class ParameterMonitor(TrainingMonitor):
    """Measures the parameters whose names match `param_filter`, and their gradients.

    A subclass keeps what it measures of a step in `_measured`, by the optimizer's number.
    """

    every_name = "log_frequency"

    def __init__(self, every: int, param_filter: list[str] | None) -> None:
        self.every = every
        self.param_filter = param_filter
        self._names: dict[int, str] | None = None
        self._measured: dict[int, Any] = {}

    def on_train_start(self, model: torch.nn.Module) -> None:
        self._measured.clear()
        self._names = None
        self.names_in(model)

    def names_in(self, model: torch.nn.Module) -> Mapping[int, str]:
        """Return the names of the monitored parameters by their `id`."""
        if self._names is None:  # training starts, or the hook was added during training
            self._names = {}  # if the next call fails, it is reported once
            try:
                self._names = named_parameters(model, self.param_filter)
            except ConfigError as error:
                raise HookConfigError(f"{type(self).__name__}: param_filter: {error}") from None
        return self._names


class MonitoredParameters:
    """The monitored parameters of one optimizer that have a gradient, in one step.

    `groups` are their parameter groups, `statistics` and `sizes` those of their gradients.
    `columns` is what was measured, with a row for each parameter; in `merged`, of all ranks.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self.groups: list[Mapping[str, Any]] = []
        self.columns: Columns = {}
        self.merged: Columns = {}
        self._before: TensorStatistics | None = None
        gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                gradient = None if name is None else parameter.grad
                if name is not None and gradient is not None and parameter.requires_grad:
                    self.names.append(name)
                    self.parameters.append(parameter)
                    self.groups.append(group)
                    gradients.append(gradient)
        self.statistics = TensorStatistics(gradients)
        self.sizes = self.statistics.sizes()

    def keep_weights(self) -> None:
        """Copy the weights before the optimizer's step."""
        copies = [parameter.detach().clone() for parameter in self.parameters]
        self._before = TensorStatistics(copies)

    @torch.no_grad()
    def measure_change(self) -> None:
        """Measure the norms of the weights and of their change, if the weights were copied."""
        before, self._before = self._before, None
        if before is None:
            return
        self.columns["weight"] = before.norms()
        after = TensorStatistics([parameter.detach() for parameter in self.parameters])
        subtract = torch._foreach_sub_  # pyright: ignore[reportPrivateImportUsage]
        subtract(before.local, after.local)  # in the copies
        self.columns["change"] = before.norms()


def read_columns(measured: Sequence[MonitoredParameters]) -> list[dict[str, list[Any]]]:
    """Return the columns of all ranks, read from the device with one transfer."""
    merge_ranks([(one.statistics, one.columns) for one in measured])
    columns = [one.merged | one.columns for one in measured]
    values = iter(read_tensors(column for several in columns for column in several.values()))
    return [{name: next(values) for name in several} for several in columns]
