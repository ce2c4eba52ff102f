"""Gradient flow: how large gradients are on their way from the loss back through the layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hookline.errors import ProbeError
from hookline.hook import Rank
from hookline.options import BuiltIn
from hookline.probes.attachment import Call
from hookline.probes.conditions import read
from hookline.probes.module_selection import Which, clean_names, select
from hookline.probes.output_gradient import on_gradient
from hookline.probes.probe import Probe
from hookline.tensors.nested import tensors_in
from hookline.tensors.sharded import local

__all__ = ["Flow", "FlowRow", "GradientFlow", "gradient_flow"]

Mark = Literal["", "no gradient", "not finite", "zero", "vanishes", "explodes"]


@dataclass(frozen=True)
class FlowRow:
    """The gradient at one layer.

    Args:
        layer: The module's name.
        norm: The gradient's norm; None where there is none.
        mean_abs: The mean of its absolute values.
        zeros: The share of its values that are zero.
        ratio: Its norm over that of the layer before, from which it comes.
        mark: What is wrong with it, if anything.
    """

    layer: str
    norm: float | None
    mean_abs: float | None
    zeros: float | None
    ratio: float | None
    mark: Mark


@dataclass(frozen=True)
class Flow:
    """Gradients layer by layer, from the loss back to the input. `print` shows a table."""

    rows: list[FlowRow]

    @property
    def first_bad(self) -> str | None:
        """The first layer, on the way back from the loss, whose gradient went bad."""
        return next((row.layer for row in self.rows if row.mark), None)

    @property
    def data(self) -> list[dict[str, Any]]:
        """The rows as dicts."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        names = ("layer", "norm", "mean abs", "zeros", "ratio", "")
        table = [names, *(_texts(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(names))]
        lines = [
            "  ".join(
                text.ljust(width) if i in (0, len(names) - 1) else text.rjust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        bad = next((row for row in self.rows if row.mark), None)
        if bad is not None:
            lines.append(f"The first layer that went bad: '{bad.layer}' ({bad.mark}).")
        return "\n".join(lines)


def gradient_flow(
    model: torch.nn.Module,
    modules: Which | None = None,
    vanishing: float = 1e-4,
    exploding: float = 1e4,
) -> Flow:
    """Return how the gradients of the parameters change from layer to layer, after backward.

    Layers are the modules that have parameters of their own, from the last in the model's order to
    the first. Of sharded parameters it is this rank's part. This waits for the device, once.

    Args:
        model: The model.
        modules: Which modules; None for all.
        vanishing: A gradient vanishes where its norm is below this share of that of the first
            layer of the table, the nearest to the loss.
        exploding: It explodes where it is above this many times that.
    """
    chosen = clean_names(model) if modules is None else select(model, modules)
    seen: set[int] = set()
    gradients: dict[str, list[Tensor]] = {}
    for name, module in chosen.items():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        if own:
            seen.update(id(parameter) for parameter in own)
            gradients[name] = [p.grad for p in own if p.grad is not None]
    measured = {name: _sums(gradients[name]) for name in reversed(gradients)}
    return Flow(list(_rows(measured, vanishing, exploding)))


class GradientFlow(BuiltIn, Probe):
    """Measures the gradients of modules' outputs, for a table of how they flow.

    `table()` has those of the last forward's backward, in the order in which they came. It cannot
    see those of compiled models, nor that of a parameter which a module returns as it is.

    Args:
        modules: Which modules to look at, as for every probe.
        vanishing: A gradient vanishes where its norm is below this share of the first one's.
        exploding: It explodes where it is above this many times the first one's.
    """

    cost = "Three passes over the gradient of each output; a transfer when the table is asked for."
    hookline_rank = Rank.MONITOR
    wants_input = False
    wants_recomputed = True  # checkpointing's reentrant kind has its graph there
    probe_name = "gradient_flow"

    def __init__(
        self, modules: Any = "**", vanishing: float = 1e-4, exploding: float = 1e4
    ) -> None:
        super().__init__(modules)
        self._vanishing = vanishing
        self._exploding = exploding
        self._sums: dict[str, Tensor] = {}
        self._again = False

    def began(self) -> None:
        """The model's forward begins: what flows back next replaces what there is."""
        self._again = True

    def after(self, call: Call) -> None:
        """A module has run."""
        if call.compiled:
            raise ProbeError(
                f"'{call.name}' is compiled, and there the gradients of outputs cannot be seen. "
                "hookline.probes.gradient_flow(model) has those of the parameters."
            )
        for tensor in tensors_in(call.output):
            on_gradient(tensor, partial(self._came, call.name))

    def _came(self, name: str, gradient: Tensor) -> None:
        attachment = self.attachment
        if attachment is not None and attachment.enabled:
            attachment.guard(self._saw, (name, gradient))

    def _saw(self, what: tuple[str, Tensor]) -> None:
        name, gradient = what
        if self._again:
            self._again, self._sums = False, {}
        sums = _sums([gradient])
        if sums is not None:
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def table(self) -> Flow:
        """Return what flowed back. This waits for the device, once."""
        return Flow(list(_rows(self._sums, self._vanishing, self._exploding)))


@torch.no_grad()
def _sums(gradients: Iterable[Tensor]) -> Tensor | None:
    """Return the sums of squares and of absolute values, the zeros and the number of values."""
    total: Tensor | None = None
    for gradient in gradients:
        part = local(gradient.detach())
        if part.layout is torch.sparse_coo:
            part = part.coalesce().values()
        if not part.numel():
            continue
        if part.is_complex():
            part = torch.view_as_real(part.resolve_conj())
        # The squares of a gradient that vanishes are zero in 32 bits.
        wide = torch.float32 if part.device.type == "mps" else torch.float64
        sums = torch.stack(
            [
                torch.linalg.vector_norm(part, dtype=wide) ** 2,
                torch.linalg.vector_norm(part, 1, dtype=wide),
                (part == 0).sum().to(wide),
                torch.full((), part.numel(), dtype=wide, device=part.device),
            ]
        )
        total = sums if total is None else total + sums.to(total.device, total.dtype)
    return total


def _rows(
    measured: Mapping[str, Tensor | None], vanishing: float, exploding: float
) -> Iterator[FlowRow]:
    values = iter(read(one for sums in measured.values() if sums is not None for one in sums))
    first: float | None = None
    before: float | None = None
    for name, sums in measured.items():
        if sums is None:
            yield FlowRow(name, None, None, None, None, "no gradient")
            continue
        squares, absolute, zeros, number = (next(values) for _ in range(4))
        norm = math.sqrt(squares)
        ratio = norm / before if before else None
        mark = _mark(norm, first, vanishing, exploding)
        yield FlowRow(name, norm, absolute / number, zeros / number, ratio, mark)
        before = norm
        if first is None and norm and math.isfinite(norm):
            first = norm


def _mark(norm: float, first: float | None, vanishing: float, exploding: float) -> Mark:
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
    return (row.layer or "(the model)", *figures, row.mark)
