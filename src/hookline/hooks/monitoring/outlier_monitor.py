"""OutlierMonitor: logs outliers, inactive units and the rank of what layers compute."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from hookline.hooks.monitoring.monitor_bases import ModuleMonitor
from hookline.probes.call import Call
from hookline.probes.module_selection import Which
from hookline.tensors.name_patterns import module_places
from hookline.tensors.nested import tensors_in
from hookline.tensors.running_statistics import unit_dimension
from hookline.tensors.sharded import local

_MASSIVE = 100.0  # a massive activation is above this, and above so many medians:
_MASSIVE_RATIO = 1000.0
_PIECE = 1 << 22  # values that are measured at once


class OutlierMonitor(ModuleMonitor):
    """Logs outliers, inactive units and the effective rank of the outputs of layers.

    The values are `activations/<module>/<measure>`, of a module's first call in a step:

    | measure | meaning |
    |---|---|
    | `abs_max` | the largest magnitude |
    | `massive` | how many values are above 100 and above 1000 times the median magnitude |
    | `kurtosis` | the fourth standardized moment; 3 for a normal distribution, more with outliers |
    | `dead` | the fraction of units that are zero everywhere |
    | `dormant` | the fraction of units whose mean magnitude is at most `tau` times the layer's |
    | `effective_rank` | exp of the entropy of the normalized singular values of the features |

    Massive activations are defined in arXiv 2402.17762, dormant units in arXiv 2302.12902. The
    first tensor of floating-point numbers in an output is measured. Units are along its last
    dimension, in outputs with four or more dimensions and those of convolutions along the channels.
    The effective rank is at most the number of positions, `rank_samples`. Values that are not
    finite make all measures NaN. With several ranks, the first one's values are logged.

    Args:
        modules: which modules, as for a probe; None for the layers of the model (what its outermost
            `ModuleList`s and `Sequential`s contain) and its activation functions that are modules.
        every: report every N optimizer steps.
        tau: the threshold of dormant units.
        rank_samples: the number of positions that the effective rank is computed from; 0: no rank.
    """

    cost = (
        "For a report about ten passes over each output, the eigenvalues of a matrix of "
        "`rank_samples` rows, and one wait for the device; in other steps about a microsecond per "
        "call of a module."
    )
    probe_name = "outlier_monitor"
    prefix = "activations"

    def __init__(
        self,
        modules: Which | None = None,
        every: PositiveInt = 100,
        *,
        tau: Annotated[float, Field(ge=0, lt=1)] = 0.025,
        rank_samples: Annotated[int, Field(ge=0)] = 128,
    ) -> None:
        super().__init__(modules)
        self.every = every
        self.tau = tau
        self.rank_samples = rank_samples
        self._reset_results()

    def choose(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that are measured."""
        return super().choose(model) if self.modules is not None else _find_layers(model)

    def after(self, call: Call) -> None:
        """Measure an output, without waiting for the device."""
        if not self.is_due(call):
            return
        output = next((t for t in tensors_in(call.output) if t.is_floating_point()), None)
        output = None if output is None else local(output.detach())
        if output is None or output.layout is not torch.strided or output.is_nested:
            self._unseen[call.name] = None
        elif output.ndim and output.numel():
            self._measured[call.name] = self._measure(output, call.module)

    def _describe_unseen(self, modules: str) -> str:
        return (
            f"OutlierMonitor measures nothing of {modules}: their outputs have no dense tensor of "
            "floating-point numbers."
        )

    @torch.no_grad()
    def _measure(self, output: Tensor, module: nn.Module | None) -> dict[str, Tensor]:
        rows = output.movedim(unit_dimension(module, output), -1)
        rows = rows.reshape(-1, rows.shape[-1])  # positions by units
        low, high = (value.float() for value in rows.aminmax())
        largest = torch.maximum(high, -low)
        found = {"abs_max": largest, **self._measure_pieces(rows, largest)}
        found["kurtosis"] = found["kurtosis"].where(high > low, torch.nan)
        if self.rank_samples:
            found["effective_rank"] = _effective_rank(rows, self.rank_samples)
        return {name: value.where(largest.isfinite(), torch.nan) for name, value in found.items()}

    def _measure_pieces(self, rows: Tensor, largest: Tensor) -> dict[str, Tensor]:
        """Measure what needs copies of the values: a piece at a time, so that memory is bounded."""
        flat = rows.reshape(-1)
        median = flat[:: -(-flat.numel() // 65536)].float().abs().median()
        threshold = (median * _MASSIVE_RATIO).clamp(min=_MASSIVE)
        mean = rows.mean(dtype=torch.float32)
        scale = largest.clamp(min=torch.finfo(torch.float32).tiny)  # else fourth powers overflow
        massive, second, fourth, of_units = (torch.zeros((), device=rows.device) for _ in range(4))
        for piece in rows.split(max(1, _PIECE // rows.shape[-1])):
            values = piece.float()
            squares = ((values - mean) / scale).square_()
            second = second + squares.sum()
            fourth = fourth + squares.square_().sum()
            magnitudes = values.abs()
            massive = massive + (magnitudes > threshold).sum()
            of_units = of_units + magnitudes.sum(0)
        of_units = of_units / len(rows)
        return {
            "massive": massive,
            "kurtosis": fourth * rows.numel() / second.square(),
            "dead": (of_units == 0).float().mean(),
            "dormant": (of_units <= self.tau * of_units.mean()).float().mean(),
        }


def _effective_rank(rows: Tensor, samples: int) -> Tensor:
    """Return exp of the entropy of the normalized singular values of evenly spaced rows."""
    rows = rows[:: -(-len(rows) // samples)].float()
    rows = rows / rows.abs().amax().clamp(min=torch.finfo(rows.dtype).tiny)
    rows = rows if rows.device.type == "mps" else rows.double()
    gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
    gram = gram.nan_to_num(0, 0, 0)  # eigenvalues of NaN raise an error
    singular: Tensor = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt_()
    total = singular.sum()
    entropy: Tensor = torch.special.entr(singular / total).sum()
    return entropy.exp().where(total > 0, 0.0)


def _find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's layers and activation functions; if it has neither, its leaf modules."""
    containers = (nn.ModuleList, nn.Sequential)
    places = {place.name: place.module for place in module_places(model)}
    outermost = [
        name
        for name, module in places.items()
        if isinstance(module, containers)
        and not any(_is_within(name, o) for o, m in places.items() if isinstance(m, containers))
    ]
    found = {
        name: module
        for name, module in places.items()
        if (name.rpartition(".")[0] in outermost and name not in outermost)
        or (_is_activation(module) and name)
    }
    if not found:
        found = {name: m for name, m in places.items() if not list(m.children())}
    return found


def _is_within(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _is_activation(module: nn.Module) -> bool:
    where = type(module).__module__
    if isinstance(module, nn.MultiheadAttention):
        return False
    return where in ("torch.nn.modules.activation", "transformers.activations")
