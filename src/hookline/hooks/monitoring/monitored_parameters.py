"""The parameters that a hook monitors: their names, their gradients in a step, and their change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.errors import ConfigError, HookConfigError
from hookline.tensors.parameter_names import named_parameters
from hookline.tensors.tensor_statistics import Columns, TensorStatistics

__all__ = ["MonitoredNames", "MonitoredParameters"]


class MonitoredNames:
    """The names of a model's parameters that a hook monitors.

    Args:
        hook: the class of the hook, for errors.
        patterns: what names have to match, as for `named_parameters`; None: all.
    """

    def __init__(self, hook: str, patterns: Sequence[str] | None) -> None:
        self._hook = hook
        self._patterns = patterns
        self._names: dict[int, str] | None = None

    def find(self, model: torch.nn.Module) -> None:
        """Find the parameters, when training starts.

        Raises:
            HookConfigError: a pattern matches no parameter. It ends training.
        """
        try:
            self._names = named_parameters(model, self._patterns)
        except ConfigError as error:
            raise HookConfigError(f"{self._hook}: param_filter: {error}") from None

    def of(self, model: torch.nn.Module) -> Mapping[int, str]:
        """Return the names by the parameter's `id`."""
        if self._names is None:  # the hook was added during training
            self._names = {}  # if the next call fails, it is reported once
            self._names = named_parameters(model, self._patterns)
        return self._names


class MonitoredParameters:
    """The monitored parameters of one optimizer that have a gradient, in one step.

    Attributes:
        names: their names.
        parameters: the parameters.
        groups: the parameter group of each.
        statistics: of their gradients.
        columns: what was measured, with a row for each parameter.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self.groups: list[Mapping[str, Any]] = []
        self.columns: Columns = {}
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
