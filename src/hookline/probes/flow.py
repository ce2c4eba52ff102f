"""Gradient flow: the size of gradients from layer to layer, from the loss back to the input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hookline.errors import ProbeError
from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.printable import printable
from hookline.probes.call import Call
from hookline.probes.gradient_capture import on_gradient
from hookline.probes.module_selection import Which, clean_names, select
from hookline.probes.probe import Probe
from hookline.tensors.device_numbers import read_tensors
from hookline.tensors.full_tensor import require_all_ranks
from hookline.tensors.nested import tensors_in
from hookline.tensors.sharded import stored_values
from hookline.tensors.statistics import TensorStatistics, Totals, merge_ranks, moments
from hookline.text_tables import format_table

_SECONDS = 60.0  # to wait for other ranks

Problem = Literal["", "no gradient", "not finite", "zero", "vanishes", "explodes"]


@dataclass(frozen=True)
class FlowRow:
    """The gradient at one layer.

    Args:
        layer: The module's name.
        norm: The gradient's norm; None if there is no gradient.
        zeros: The fraction of its values that are zero.
        ratio: Its norm divided by that of the row before, where the gradient comes from.
        problem: Why it is not as it should be; empty if it is.
    """

    layer: str
    norm: float | None
    zeros: float | None
    ratio: float | None
    problem: Problem


@dataclass(frozen=True)
class Flow:
    """Gradients layer by layer, from the loss back to the input. `print` shows a table."""

    rows: list[FlowRow]

    @property
    def first_bad(self) -> str | None:
        """The first layer, from the loss on, whose gradient has a problem."""
        return next((row.layer for row in self.rows if row.problem), None)

    @property
    def data(self) -> list[dict[str, Any]]:
        """The rows as dicts."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        names = ("layer", "norm", "zeros", "ratio", "")
        lines = [format_table(names, [_texts(row) for row in self.rows], right=range(1, 4))]
        bad = next((row for row in self.rows if row.problem), None)
        if bad is not None:
            first = f"'{printable(bad.layer)}' ({bad.problem})"
            lines.append(f"The first layer with a problem: {first}.")
        return "\n".join(lines)


def gradient_flow(
    model: torch.nn.Module,
    modules: Which | None = None,
    vanishing: float = 1e-4,
    exploding: float = 1e4,
) -> Flow:
    """Return the gradients of the parameters layer by layer, after backward.

    Layers are the modules that have parameters of their own, from the last in the model's order to
    the first. This waits for the device, once. If parameters are sharded (FSDP2) it is a
    collective, which all ranks have to call.

    Args:
        model: The model.
        modules: Which modules; None for all.
        vanishing: A gradient vanishes if its norm is below this fraction of that of the first
            layer of the table, the nearest to the loss.
        exploding: It explodes if its norm is above this multiple of it.
    """
    chosen = clean_names(model) if modules is None else select(model, modules)
    seen: set[int] = set()
    gradients: dict[str, list[Tensor]] = {}
    for name, module in chosen.items():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        if own:
            seen.update(id(parameter) for parameter in own)
            gradients[name] = [p.grad for p in own if p.grad is not None]
    totals = {name: Totals() for name in reversed(gradients)}
    layers = [name for name, own in gradients.items() for _ in own]
    for name, size, row in zip(layers, *_measure_all_ranks(gradients.values()), strict=True):
        totals[name].add(size, row)
    return Flow(list(_rows(totals, vanishing, exploding)))


def _measure_all_ranks(
    gradients: Iterable[Sequence[Tensor]],
) -> tuple[Sequence[int], Sequence[Sequence[float]]]:
    """Return the size and the moments of each gradient; for sharded ones this is a collective."""
    several = [gradient for own in gradients for gradient in own]
    if not several:
        return [], []
    require_all_ranks(several, "gradient_flow", _SECONDS)
    statistics = TensorStatistics(several)
    columns = statistics.moments()
    merge_ranks([(statistics, columns)])
    finite, mean, squares, largest, zeros = read_tensors(columns.values())
    rows = zip(finite, mean, squares, largest, largest, zeros, strict=True)
    return statistics.sizes(), list(rows)


class GradientFlow(BuiltIn, Probe):
    """Measures the gradients of modules' outputs and shows them as a table.

    `table()` has those of the last forward's backward, in the order in which they were computed. It
    has none of compiled models, and none of a parameter that a module returns itself.

    Args:
        modules: Which modules to measure, as for every probe.
        vanishing: A gradient vanishes if its norm is below this fraction of the first one's.
        exploding: It explodes if its norm is above this multiple of the first one's.
    """

    cost = "About ten passes over the gradient of each output; one transfer for each table."
    hookline_group = HookGroup.MONITOR
    wants_input = False
    wants_recomputed = True  # a reentrant checkpoint has its graph there
    probe_name = "gradient_flow"

    def __init__(
        self, modules: Any = "**", vanishing: float = 1e-4, exploding: float = 1e4
    ) -> None:
        super().__init__(modules)
        self._vanishing = vanishing
        self._exploding = exploding
        self._measured: list[tuple[str, int, Tensor]] = []  # layer, size and moments
        self._starts_over = False

    def forward_start(self) -> None:
        """Have the next backward replace the table."""
        self._starts_over = True

    def after(self, call: Call) -> None:
        """Have the gradients of a module's output measured."""
        if call.compiled:
            raise ProbeError(
                f"'{call.name}' is compiled, so the gradients of its outputs cannot be seen. Use "
                "hookline.probes.gradient_flow(model), which shows those of the parameters."
            )
        for tensor in tensors_in(call.output):
            on_gradient(tensor, partial(self.call_guarded, self._add, call.name))

    def _add(self, name: str, gradient: Tensor) -> None:
        if self._starts_over:
            self._starts_over, self._measured = False, []
        values = stored_values(gradient)
        self._measured.append((name, values.numel(), moments(values)))

    def table(self) -> Flow:
        """Return the table. This waits for the device, once."""
        totals: dict[str, Totals] = {}
        rows = read_tensors(row for *_, row in self._measured)
        for (name, size, _), row in zip(self._measured, rows, strict=True):
            totals.setdefault(name, Totals()).add(size, row)
        return Flow(list(_rows(totals, self._vanishing, self._exploding)))


def _rows(layers: Mapping[str, Totals], vanishing: float, exploding: float) -> Iterator[FlowRow]:
    first: float | None = None
    before: float | None = None
    for name, totals in layers.items():
        if not totals.size:
            yield FlowRow(name, None, None, None, "no gradient")
            continue
        norm = totals.metric("norm") if totals.finite == totals.size else math.nan
        ratio = norm / before if before else None
        problem = _find_problem(norm, first, vanishing, exploding)
        yield FlowRow(name, norm, totals.metric("zeros"), ratio, problem)
        before = norm
        if first is None and norm and math.isfinite(norm):
            first = norm


def _find_problem(norm: float, first: float | None, vanishing: float, exploding: float) -> Problem:
    if not math.isfinite(norm):
        return "not finite"
    if norm == 0:
        return "zero"
    if first is not None and norm < vanishing * first:
        return "vanishes"
    if first is not None and norm > exploding * first:
        return "explodes"
    return ""


def _texts(row: FlowRow) -> tuple[str, ...]:
    norm, ratio = ("" if value is None else f"{value:.3g}" for value in (row.norm, row.ratio))
    zeros = "" if row.zeros is None else f"{row.zeros:.1%}"
    return (row.layer or "(the model)", norm, zeros, ratio, row.problem)
