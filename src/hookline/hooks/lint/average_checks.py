"""Rule 11, averages (EMA, SWA): they move toward the weights, and are tensors of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hookline.hooks.lint.finding import Check, in_due_steps
from hookline.hooks.lint.training_view import FIRST_STEPS, TrainingView
from hookline.loop.patches import calling_frames
from hookline.tensors.name_patterns import unwrap_module

_SEARCHED_STEP = 3  # an average is made before or in the first steps
_STEPS_IN_A_ROW = 3
_MANY_STEPS = 6
_FAR = 4  # times as far from the weights as these move in a step
_MAX_PAIRS = 8
_NAMES = ("ema", "average", "shadow", "swa", "polyak")


@dataclass(eq=False)
class _Average:
    """An average that follows the parameters, and what was measured of some of them."""

    name: str
    holder: Any  # a module, a mapping or a sequence with the tensors
    parameters: dict[str, Tensor]
    before: Tensor | None = None
    weights: Tensor | None = None
    ratios: list[float] = field(default_factory=list[float])

    @property
    def pairs(self) -> list[tuple[str, Tensor, Tensor]]:
        """Names, averages and parameters; an update may put new tensors into the holder."""
        tensors = self.holder
        if isinstance(tensors, nn.Module):
            tensors = _parameters_of(tensors)
        elif not isinstance(tensors, Mapping):
            tensors = dict(zip(self.parameters, tensors, strict=False))
        found: list[tuple[str, Tensor, Tensor]] = []
        for name, parameter in self.parameters.items():
            # The average may be that of a part of the model, or of one of several models.
            key = next(
                (k for k in tensors if isinstance(k, str) and f".{name}".endswith(f".{k}")), None
            )
            if key is not None and _follows(tensors[key], parameter):
                found.append((name, tensors[key], parameter))
        return found[:_MAX_PAIRS]

    def sampled(self, view: TrainingView) -> tuple[Tensor, Tensor]:
        """Return some elements of the average, and the same ones of the parameters."""
        pairs = [(view.sample(a).double(), view.sample(p).double()) for _, a, p in self.pairs]
        averages, parameters = zip(*pairs, strict=True)
        return torch.cat(averages), torch.cat(parameters)


class _AverageCheck(Check):
    def setup(self) -> None:
        self._averages: list[_Average] | None = None

    def _find_averages(self) -> list[_Average]:
        if self._averages is None and self.view.steps_seen >= _SEARCHED_STEP:
            self._averages = search_averages(self.view)
            if not self._averages:
                self.left_out = "no average of the weights was found"
        return self._averages or []


class AverageMovesAway(_AverageCheck):
    """An average of the weights does not move toward them, or is a copy of them.

    An exponential average takes a small part of the way to the weights in each step. With the two
    factors exchanged it takes nearly the whole way; `p.data` without `clone` is the weight itself.

    Bug:
        ema.mul_(1 - decay).add_(weight, alpha=decay)  # decay = 0.999
    Fix: `ema.mul_(decay).add_(weight, alpha=1 - decay)`, or `torch.optim.swa_utils.AveragedModel`.
    Ignore: When the average is meant to follow the weights closely.
    """

    @in_due_steps
    def on_step_end(self) -> None:
        for average in self._find_averages():
            shared = [n for n, a, p in average.pairs if a.data_ptr() == p.data_ptr() != 0]
            if shared:
                self.find(average.name, f"'{shared[0]}' and its average are the same memory.")
                return
            now, weights = average.sampled(self.view)
            is_same = average.before is not None and average.before.shape == now.shape
            if average.before is not None and average.weights is not None and is_same:
                moved = now - average.before
                # Most loops update the average after the step, some before it has ended.
                ways = [average.weights - average.before, weights - average.before]
                products = [
                    term for way in ways for term in ((moved * way).sum(), way.square().sum())
                ]
                self.read([moved.square().sum(), *products], self._judge, average)
            average.before, average.weights = now, weights

    def _judge(self, numbers: list[float], average: _Average) -> None:
        moved, *products = numbers
        ways = [
            (product, square)
            for product, square in zip(products[::2], products[1::2], strict=True)
            if square
        ]
        if not moved or not ways:
            return  # it was not updated in this step
        product, square = max(ways, key=lambda way: way[0] ** 2 / way[1])
        is_parallel = product * product >= 0.98 * square * moved
        average.ratios.append(product / square if is_parallel else 0.5)
        latest, many = average.ratios[-_STEPS_IN_A_ROW:], average.ratios[-_MANY_STEPS:]
        if len(latest) == _STEPS_IN_A_ROW and max(latest) < 0:
            self._find(average, f"it moves away from the weights, by {-latest[-1]:.3g} of")
        elif len(many) == _MANY_STEPS and min(many) > 0.9 and max(many) < 0.99999:
            self._find(average, f"in each step it takes {many[-1]:.4g} of")

    def _find(self, average: _Average, problem: str) -> None:
        self.find(
            average.name,
            f"The average of '{average.pairs[0][0]}' and others is wrong: {problem} the way to the "
            "weights.",
        )


class AverageRestartsAfterLoading(_AverageCheck):
    """An average was restored, but its first update throws it away.

    Many averages follow the weights closely at first, by a counter of updates. Where the counter
    is not saved, the first update after resuming replaces what was averaged.

    Bug:
        decay = 0.999 * (1 - math.exp(-self.updates / 2000))  # `updates` is in no state_dict
    Fix: Save the counter with the average, as a buffer.
    Ignore: When the average is meant to start again.
    """

    def setup(self) -> None:
        super().setup()
        self._has_loaded = False
        self._start: list[tuple[_Average, Tensor, Tensor]] = []  # itself and weights before

    def on_state_loaded(self, target: Any, state: Any) -> None:
        is_optimizer = isinstance(target, torch.optim.Optimizer)
        self._has_loaded = self._has_loaded or (is_optimizer and bool(state.get("state")))

    def on_step_after_loading(self, optimizer: Any) -> None:
        if self.view.steps_seen == 1 and self._has_loaded and not self._start:
            for average in search_averages(self.view):
                self._start.append((average, *average.sampled(self.view)))

    @in_due_steps
    def on_step_end(self) -> None:
        if self.view.steps_seen != 2:
            return
        for average, before, old in self._start:
            now, weights = average.sampled(self.view)[0], average.weights
            if weights is None or now.shape != before.shape:
                continue
            moved, way = now - before, weights - before
            squares = [x.square().sum() for x in (way, moved, weights - old)]
            self.read([(moved * way).sum(), *squares], self._judge, average)
        self._start = []

    @in_due_steps
    def on_after_optimizer_step(self, optimizer: Any) -> None:
        if self.view.steps_seen == 1:
            for average, _, _ in self._start:
                average.weights = average.sampled(self.view)[1]

    def _judge(self, numbers: list[float], average: _Average) -> None:
        product, square, moved, step = numbers
        if not square or product * product < 0.98 * square * moved:
            return
        part = product / square
        # One that takes this part of the way each time, also before, is not that far from them.
        is_far = part > 0 and square > (_FAR / part) ** 2 * step
        if is_far and 0.2 < part < 0.99999:  # 1 is a copy on purpose
            self.find(
                average.name,
                f"The first update after a state was loaded moved the average {part:.3g} of the "
                "way to the weights: what was averaged before is lost.",
            )


class AverageOfCounters(_AverageCheck):
    """A counter of the model is averaged, where it should be copied.

    An integer buffer counts something; the mean of counts belongs to no state of the model, and
    what is computed from it and other buffers is wrong.

    Bug:
        AveragedModel(model, use_buffers=True)  # the model has a buffer "count"
    Fix: Average the parameters only, and copy the buffers: `use_buffers=False`.
    Ignore: When nothing uses the averaged counter.
    """

    @in_due_steps
    def on_step_end(self) -> None:
        if self.view.steps_seen > FIRST_STEPS:
            return  # values of the counter between due steps are not known
        counters = {n: b for n, b in self.view.model.named_buffers() if b.dtype is torch.int64}
        for average in self._find_averages():
            holder = average.holder
            own = dict(holder.named_buffers()) if isinstance(holder, nn.Module) else {}
            for name, counter in counters.items():
                key = next((k for k in own if f".{k}".endswith(f".{name}")), None)
                is_other = "num_batches_tracked" not in name and counter.numel() == 1
                if key is not None and is_other and own[key] is not counter:
                    self.read([own[key], counter], self._judge, average.name, name)

    def _judge(self, numbers: list[float], average: str, name: str) -> None:
        mine, counter = numbers
        seen = self._seen.setdefault(name, set())
        seen.add(counter)
        if self.in_a_row(mine not in seen and 0 < mine < counter, name) >= _STEPS_IN_A_ROW:
            self.find(
                f"{average}, buffer '{name}'",
                f"The model's counter '{name}' is {counter:.0f}, and the average's is {mine:.0f}, "
                "a number that the counter never was in a step that was looked at.",
            )

    def setup(self) -> None:
        super().setup()
        self._seen: dict[str, set[float]] = {}


def search_averages(view: TrainingView) -> list[_Average]:
    """Return the averages of the model's weights that the loop's own code has.

    They are found by their class, or by the name of a variable, an attribute or a class, in the
    functions that are running and in the attributes of what these have.
    """
    parameters: dict[str, Tensor] = {place.name: place.tensor for place in view.parameters}
    seen = {id(module) for module in view.model.modules()}
    found: list[_Average] = []
    for frame in calling_frames():
        if frame.f_globals.get("__name__", "").split(".")[0] in ("hookline", "torch"):
            continue
        for values in (frame.f_locals, frame.f_globals):
            for name, value in list(values.items()):
                found += _look_at(name, value, parameters, seen, depth=2)
    return found


def _look_at(
    name: str, value: Any, parameters: dict[str, Tensor], seen: set[int], depth: int
) -> list[_Average]:
    """Return the averages that a value is or has."""
    if id(value) in seen or isinstance(value, type | ModuleType | Tensor | str | int | float):
        return []
    seen.add(id(value))
    is_named = _is_average_name(name) or _is_average_name(type(value).__name__)
    if isinstance(value, nn.Module | Mapping | list | tuple):
        is_average = is_named or isinstance(value, AveragedModel) or _is_frozen(value)
        kind = f"{type(value).__name__} " if isinstance(value, nn.Module) else ""
        average = _Average(f"{kind}'{name}'", value, parameters)
        return [average] if is_average and average.pairs else []
    attributes = getattr(value, "__dict__", None)
    if depth == 0 or not isinstance(attributes, dict):
        return []
    owner = f"{name}." if is_named else ""
    return [
        each
        for key, inner in list(attributes.items())
        for each in _look_at(f"{owner}{key}", inner, parameters, seen, depth - 1)
    ]


def _parameters_of(module: nn.Module) -> dict[str, Tensor]:
    inner = getattr(module, "module", module)
    return dict(unwrap_module(inner if isinstance(inner, nn.Module) else module).named_parameters())


def _is_frozen(value: Any) -> bool:
    return isinstance(value, nn.Module) and not any(p.requires_grad for p in value.parameters())


def _follows(tensor: Any, parameter: Tensor) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor is not parameter
        and tensor.shape == parameter.shape
        and tensor.is_floating_point()
    )


def _is_average_name(name: str) -> bool:
    return any(word in name.lower() for word in _NAMES)
