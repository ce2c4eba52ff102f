"""Gradient flow: the size of gradients from layer to layer, from the loss back to the input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hookline.probes.module_selection import Which, select
from hookline.tensors.device_numbers import read_tensors, widest_float
from hookline.tensors.full_tensor import require_all_ranks
from hookline.tensors.norms import reduce_sum
from hookline.tensors.sharded import is_sharded, local_with_groups, stored_values
from hookline.text_tables import format_table

_SECONDS = 60.0  # to wait for other ranks

Problem = Literal["", "no gradient", "not finite", "zero", "vanishes", "explodes"]


@dataclass(frozen=True)
class FlowRow:
    """The gradient at one layer.

    Args:
        layer: The module's name.
        norm: The gradient's norm; None if there is no gradient.
        mean_abs: The mean of its absolute values.
        zeros: The fraction of its values that are zero.
        ratio: Its norm divided by that of the row before, where the gradient comes from.
        problem: What is wrong with it, if anything.
    """

    layer: str
    norm: float | None
    mean_abs: float | None
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
        names = ("layer", "norm", "mean abs", "zeros", "ratio", "")
        lines = [format_table(names, [_texts(row) for row in self.rows], right=range(1, 5))]
        bad = next((row for row in self.rows if row.problem), None)
        if bad is not None:
            lines.append(f"The first layer with a problem: '{bad.layer}' ({bad.problem}).")
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
    seen: set[int] = set()
    gradients: dict[str, list[Tensor]] = {}
    for name, module in select(model, "**" if modules is None else modules).items():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        if own:
            seen.update(id(parameter) for parameter in own)
            gradients[name] = [p.grad for p in own if p.grad is not None]
    measured = _sums_of_all_ranks({name: gradients[name] for name in reversed(gradients)})
    return Flow(list(_rows(measured, vanishing, exploding)))


@torch.no_grad()
def _sums_of_all_ranks(gradients: Mapping[str, list[Tensor]]) -> dict[str, Tensor | None]:
    """Return the sums of each layer, with the parts of sharded gradients on other ranks."""
    layers = [(name, gradient) for name, several in gradients.items() for gradient in several]
    require_all_ranks((gradient for _, gradient in layers), "gradient_flow", _SECONDS)
    by_groups: dict[tuple[Any, ...], dict[str, Tensor]] = {}  # with parts of the same tensors
    for name, gradient in layers:
        part, groups = local_with_groups(gradient) if is_sharded(gradient) else (gradient, ())
        sums = _sums(part)
        if sums is None:  # this rank has nothing of it
            sums = torch.zeros(4, dtype=widest_float(part.device), device=part.device)
        layer = by_groups.setdefault(groups, {})
        layer[name] = layer[name] + sums if name in layer else sums
    total: dict[str, Tensor | None] = dict.fromkeys(gradients)
    for groups, layer in by_groups.items():
        reduced = reduce_sum(torch.stack([*layer.values()]), groups)
        for name, sums in zip(layer, reduced, strict=True):
            known = total[name]
            total[name] = sums if known is None else known + sums
    return total


@torch.no_grad()
def _sums(gradient: Tensor) -> Tensor | None:
    """Return the sums of squares and of absolute values, the zeros and the number of values."""
    part = stored_values(gradient)
    if not part.numel():
        return None
    wide = widest_float(part.device)  # the squares of a gradient that vanishes are zero in 32 bits
    return torch.stack(
        [
            torch.linalg.vector_norm(part, dtype=wide) ** 2,
            torch.linalg.vector_norm(part, 1, dtype=wide),
            (part == 0).sum().to(wide),
            torch.full((), part.numel(), dtype=wide, device=part.device),
        ]
    )


def _rows(
    measured: Mapping[str, Tensor | None], vanishing: float, exploding: float
) -> Iterator[FlowRow]:
    values = iter(read_tensors(sums for sums in measured.values() if sums is not None))
    first: float | None = None
    before: float | None = None
    for name, sums in measured.items():
        if sums is None:
            yield FlowRow(name, None, None, None, None, "no gradient")
            continue
        squares, absolute, zeros, number = next(values)
        norm = math.sqrt(squares)
        ratio = norm / before if before else None
        problem = _find_problem(norm, first, vanishing, exploding)
        yield FlowRow(name, norm, absolute / number, zeros / number, ratio, problem)
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
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    zeros = "" if row.zeros is None else f"{row.zeros:.1%}"
    figures = (number(row.norm), number(row.mean_abs), zeros, number(row.ratio))
    return (row.layer or "(the model)", *figures, row.problem)
