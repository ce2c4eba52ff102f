"""OutlierMonitor: logs outliers, inactive units and the rank of what layers compute."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.probes.call import Call
from hookline.probes.module_selection import Which
from hookline.probes.probe import Probe
from hookline.tensors.name_patterns import module_places
from hookline.tensors.nested import tensors_in
from hookline.tensors.reading import read_tensors
from hookline.tensors.running_counts import unit_dimension
from hookline.tensors.sharded import local

__all__ = ["OutlierMonitor"]

_MASSIVE = 100.0  # a massive activation is above this, and above so many medians:
_MASSIVE_RATIO = 1000.0


class OutlierMonitor(BuiltIn, Probe):
    """Logs outliers, inactive units and the effective rank of the outputs of layers.

    The values are `activations/<module>/<measure>`, of the first batch of a step:

    | measure | meaning |
    |---|---|
    | `abs_max` | the largest magnitude |
    | `massive` | how many values are above 100 and above 1000 times the median magnitude |
    | `kurtosis` | the fourth standardized moment; 3 for a normal distribution, more with outliers |
    | `dead` | the fraction of units that are zero everywhere |
    | `dormant` | the fraction of units whose mean magnitude is at most `tau` times the layer's |
    | `effective_rank` | exp of the entropy of the normalized singular values of the features |

    Massive activations are defined in arXiv 2402.17762, dormant units in arXiv 2302.12902. Units
    are along the last dimension, in the outputs of convolutions along the channels. `massive`
    uses the median of up to 65,536 values, evenly spaced. The effective rank is that of up to
    `rank_samples` positions, evenly spaced, so it is at most that number. Values that are not
    finite make the measures NaN. With several ranks each measures its own batch, and the first
    one's values are logged. A recomputation by activation checkpointing is not measured.

    Args:
        modules: which modules: names, globs, regular expressions, types, predicates, or modules
            themselves; None for the layers of the model (what its outermost `ModuleList`s and
            `Sequential`s contain) and its activation functions that are modules.
        log_frequency: report every N optimizer steps.
        tau: the threshold of dormant units.
        rank_samples: the number of positions that the effective rank is computed from; 0: no rank.
    """

    cost = (
        "In the first batch of a step with a report about eight passes over each output, the "
        "eigenvalues of a matrix of `rank_samples` rows, and one wait for the device; in other "
        "steps about a microsecond per call of a module."
    )
    hookline_group = HookGroup.MONITOR
    hookline_records = True
    probe_name = "outlier_monitor"
    wants_input = False
    _results = ("_measured", "_step")

    def __init__(
        self,
        modules: Which | None = None,
        log_frequency: PositiveInt = 100,
        *,
        tau: Annotated[float, Field(ge=0, lt=1)] = 0.025,
        rank_samples: Annotated[int, Field(ge=0)] = 128,
    ) -> None:
        super().__init__(modules)
        self.log_frequency = log_frequency
        self.tau = tau
        self.rank_samples = rank_samples
        self._reset_results()

    def _reset_results(self) -> None:
        self._measured: dict[str, dict[str, Tensor]] = {}
        self._step: int | None = None

    def choose(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that are measured."""
        return super().choose(model) if self.modules is not None else _find_layers(model)

    def after(self, call: Call) -> None:
        """Measure an output, without waiting for the device."""
        if call.step is not None and (call.step + 1) % self.log_frequency:
            return
        if call.step != self._step:
            self._measured, self._step = {}, call.step
        if call.name in self._measured:
            return
        output = next((t for t in tensors_in(call.output) if t.is_floating_point()), None)
        output = None if output is None else local(output.detach())
        if output is None or output.layout is not torch.strided or output.is_nested:
            return
        if output.ndim and output.numel():
            self._measured[call.name] = self._measure(output, call.module)

    def on_train_start(self) -> None:
        """Forget what was measured before."""
        self._reset_results()

    def on_step_end(self, trainer: Any) -> None:
        """Read all measurements at once, and log them."""
        for module, values in self.report().items():
            prefix = f"activations/{module}" if module else "activations"
            for measure, value in values.items():
                trainer.log(f"{prefix}/{measure}", value)

    def report(self) -> dict[str, dict[str, float]]:
        """Return what was measured since the last report, by module and measure."""
        if not self._measured:
            return {}
        measured, self._measured = self._measured, {}
        values = iter(read_tensors(v for several in measured.values() for v in several.values()))
        return {module: {name: next(values) for name in many} for module, many in measured.items()}

    @torch.no_grad()
    def _measure(self, output: Tensor, module: nn.Module | None) -> dict[str, Tensor]:
        rows = output.movedim(unit_dimension(module, output), -1)
        rows = rows.reshape(-1, rows.shape[-1]).float()  # positions by units
        magnitudes = rows.abs()
        by_unit = magnitudes.mean(0)
        flat = magnitudes.reshape(-1)
        median = flat[:: -(-flat.numel() // 65536)].median()
        threshold = (median * _MASSIVE_RATIO).clamp(min=_MASSIVE)
        squares = (rows - rows.mean()).square_()
        variance = squares.mean()
        found = {
            "abs_max": magnitudes.amax(),
            "massive": (magnitudes > threshold).sum(),
            "kurtosis": squares.square_().mean() / variance.square(),
            "dead": (by_unit == 0).float().mean(),
            "dormant": (by_unit <= self.tau * by_unit.mean()).float().mean(),
        }
        if self.rank_samples:
            found["effective_rank"] = _effective_rank(rows, self.rank_samples)
        return found


def _effective_rank(rows: Tensor, samples: int) -> Tensor:
    """Return exp of the entropy of the normalized singular values of evenly spaced rows."""
    rows = rows[:: -(-len(rows) // samples)]
    rows = rows / rows.abs().amax().clamp(min=torch.finfo(rows.dtype).tiny)
    rows = rows if rows.device.type == "mps" else rows.double()
    gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
    gram = gram.nan_to_num(0, 0, 0)  # eigenvalues of NaN raise an error
    singular: Tensor = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt_()
    entropy: Tensor = torch.special.entr(singular / singular.sum()).sum()
    return entropy.exp()


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
