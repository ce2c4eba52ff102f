"""Rule 1, updates take effect: what has a gradient is in one optimizer, and changes as it says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hookline.hooks.lint.finding import Check, in_due_steps
from hookline.hooks.lint.loss_graph import LossGraph
from hookline.hooks.lint.repeated_call import RepeatableCall
from hookline.hooks.lint.step_samples import EXACT, StepSample, steps_alone
from hookline.hooks.lint.torch_watch import ModuleCall
from hookline.hooks.lint.training_view import FIRST_STEPS, ParameterPlace, TrainingView
from hookline.tensors.nested import tensors_in

_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.bfloat16, torch.float16)
_FEW_UNTRAINED = 0.5  # elements that no optimizer has, per element that one has
_MAX_UNTRAINED = 3.0  # the same, where parameters of the same kind are trained
_TOLERANCE = 0.05  # of an update
_ROUNDED_AWAY = 0.9  # of all elements
_IN_A_ROW = 3
_MANY_IN_A_ROW = 5
_MAX_CALLS = 2000
_MAX_CHANGED = 8  # weights that an active check changes in a copy


class _Untrained(NamedTuple):
    """A parameter that no optimizer has, and some of its values in an early step."""

    name: str
    parameter: Tensor
    values: Tensor
    step: int


class ParameterNotInOptimizer(Check):
    """A parameter gets gradients, but no optimizer has it, so it keeps its initial value.

    It is in a plain list, was left out, or replaced another one after the optimizer was made (a new
    head, wrapping, `to_empty`). A frozen backbone under a trained head is no finding.

    Bug:
        self.blocks = [Block() for _ in range(4)]  # no nn.ModuleList
        optimizer = AdamW(model.parameters())
    Fix: Register modules (`nn.ModuleList`), and give the optimizer all final parameters.
    Ignore: When you train a part on purpose and leave `requires_grad` of the rest on.
    """

    def setup(self) -> None:
        self._first: dict[int, _Untrained] = {}
        self._gradients: dict[int, Tensor] = {}  # their sums of magnitudes
        self._replaced: set[int] = set()
        self._has_frozen = False

    @in_due_steps
    def on_before_backward(self, loss: Any) -> None:
        is_early = self.view.steps_seen <= _IN_A_ROW
        if not is_early or not isinstance(loss, Tensor) or loss.grad_fn is None:
            return
        graph, held = LossGraph(loss), self.view.optimized()
        if not graph.is_complete or graph.leaves.keys() <= held.keys():
            return
        # All are suspected if the loss reaches nothing that an optimizer has, or if parameters were
        # frozen after the optimizer was made: then those that are not frozen are to be trained.
        suspected, places = set(graph.leaves), self.view.parameters
        self._has_frozen = any(
            id(place.tensor) in held and not place.tensor.requires_grad for place in places
        )
        if suspected & held.keys() and not self._has_frozen:
            suspected = graph.reached_after(set(held))
        names = {id(place.tensor): place.name for place in places}
        if any(key in held and key not in names for key in graph.leaves):
            return  # inputs are trained: the model is a function that stays as it is
        for key in (*names, *(key for key in graph.leaves if key not in names)):
            if key in suspected and key not in held:
                name = names.get(key) or _name_in_list(self.view.model, graph.leaves[key])
                if name is not None:
                    self._follow(name, graph.leaves[key])

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """See which parameters replaced one that the optimizer still has."""
        early = self.view.steps_seen <= FIRST_STEPS
        shapes = _shapes_of_strangers(self.view, optimizer) if early else set()
        held = self.view.optimized() if shapes else {}
        for place in self.view.parameters if shapes else ():
            tensor = place.tensor
            if tensor.grad is not None and id(tensor) not in held and tensor.shape in shapes:
                self._replaced.add(id(tensor))
                self._follow(place.name, tensor)

    def _follow(self, name: str, parameter: Tensor) -> None:
        if id(parameter) not in self._first:
            values = self.sample(parameter)
            row = _Untrained(name, parameter, values, self.view.steps_seen)
            self._first[id(parameter)] = row

    @in_due_steps
    def on_after_optimizer_step(self, optimizer: Any) -> None:
        for key, row in self._first.items():
            if row.parameter.grad is not None:
                self._gradients[key] = self.sample(row.parameter.grad).abs().sum()

    @in_due_steps
    def on_step_end(self) -> None:
        gradients, self._gradients = self._gradients, {}
        held = self.view.optimized() if self._first else {}
        is_early = self.view.steps_seen <= FIRST_STEPS
        self._first = {k: row for k, row in self._first.items() if is_early and k not in held}
        until = self.view.steps_seen - _IN_A_ROW + 1
        ripe = [r for key, r in self._first.items() if r.step <= until and key in gradients]
        if ripe:
            same = [(self.sample(row.parameter) == row.values).all() for row in ripe]
            sums = [gradients[id(row.parameter)] for row in ripe]
            self.read([*same, *sums], self._judge, ripe)

    def _judge(self, numbers: list[float], rows: list[_Untrained]) -> None:
        same, sums = numbers[: len(rows)], numbers[len(rows) :]
        stuck = [
            row for row, is_same, total in zip(rows, same, sums, strict=True) if is_same and total
        ]
        if not stuck or _is_held_by_unseen([row.parameter for row in stuck], self.view.optimizers):
            return
        replaced = [row for row in stuck if id(row.parameter) in self._replaced]
        others = [row for row in stuck if id(row.parameter) not in self._replaced]
        stuck = [*replaced, *self._without_adapted(others)]
        if not stuck:
            return
        why = " They replaced others, which an optimizer still has." if replaced else ""
        self.find(
            [row.name for row in stuck],
            f"{len(stuck)} parameters ({sum(row.parameter.numel() for row in stuck):,} elements) "
            f"get gradients, but no optimizer has them, and they have not changed in {_IN_A_ROW} "
            f"steps.{why}",
        )

    def _without_adapted(self, stuck: list[_Untrained]) -> list[_Untrained]:
        """Return the parameters without those beside which adapters or biases are trained.

        These are many, compared with the trained ones, and no others of their kind are trained.
        """
        held, places = self.view.optimized(), self.view.parameters
        trained = [e for e in places if id(e.tensor) in held and e.tensor.requires_grad]
        size = sum(each.tensor.numel() for each in trained)
        is_few = sum(row.parameter.numel() for row in stuck) <= _FEW_UNTRAINED * size
        if is_few or self._has_frozen or all(each.tensor.grad is None for each in trained):
            return stuck
        kinds = {_kind(each) for each in trained}
        own = {id(each.tensor): _kind(each) for each in places}
        listed = [row for row in stuck if id(row.parameter) not in own]  # modules in plain lists
        alike = [row for row in stuck if own.get(id(row.parameter)) in kinds]
        is_few = sum(row.parameter.numel() for row in alike) <= _MAX_UNTRAINED * size
        return [*listed, *alike] if is_few else listed


def _kind(place: ParameterPlace) -> tuple[type, str]:
    return type(place.module), place.attribute


class ParameterInTwoOptimizers(Check):
    """Two optimizers step the same parameter with the same gradient.

    It is changed twice in each step, and each optimizer's moments belong to weights that the other
    one has moved.

    Bug:
        body = AdamW(model.parameters())
        head = AdamW(model.head.parameters())
    Fix: Give each parameter to one optimizer.
    Ignore: When both updates are meant.
    """

    def setup(self) -> None:
        self._used: dict[int, Any] = {}  # by parameter: its optimizer, since the latest backward
        self._twice: dict[str, tuple[Any, Any]] = {}

    @in_due_steps
    def on_before_backward(self, loss: Any) -> None:
        """Forget: gradients are others afterwards."""
        self._used = {}

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in parameters_of(optimizer) if len(self.view.optimizers) > 1 else ():
            if parameter.grad is not None and parameter.requires_grad:
                first = self._used.setdefault(id(parameter), optimizer)
                if first is not optimizer:
                    name = self.view.name_of(parameter) or "a parameter"
                    self._twice[name] = first, optimizer

    @in_due_steps
    def on_step_end(self) -> None:
        twice, self._twice = self._twice, {}
        if self.in_a_row(twice) >= 2:
            first, second = next(iter(twice.values()))
            self.find(
                list(twice),
                f"{type(first).__name__} and {type(second).__name__} have stepped {len(twice)} "
                "parameters with the same gradient, in 2 steps in a row.",
            )


class UpdateDiffersFromOptimizer(Check):
    """A step of SGD, Adam or AdamW changed a parameter by something else than it should.

    It follows from learning rate, options, moments and gradient. A compiled optimizer that keeps an
    old learning rate, or a kernel that writes to a copy of memory that is not contiguous, subtracts
    something else, or nothing.

    Bug:
        step = torch.compile(optimizer.step)  # with a learning rate that was constant when compiled
    Fix: Make the learning rate a tensor in compiled optimizers; try `foreach=False, fused=False`.
    Ignore: When something changes weights within the step on purpose.
    """

    def setup(self) -> None:
        self._before: dict[int, set[str]] = {}  # by optimizer: what differed in the step before

    def on_step_sampled(self, optimizer: Any, samples: list[StepSample]) -> None:
        known = [s for s in samples if s.expected is not None and s.is_kept]
        known = [each for each in known if each.parameter.dtype in _WIDE]
        if known:
            names = [each.name for each in known]
            self.read([_compare(each) for each in known], self._judge, optimizer, names)

    def _judge(self, rows: list[list[float]], optimizer: Any, names: list[str]) -> None:
        named = zip(names, rows, strict=True)
        wrong = {name: row for name, row in named if row[0] and row[1] > row[0] / 2}
        self.view.suspects |= set(wrong)
        previous, self._before[id(optimizer)] = self._before.get(id(optimizer), set()), set(wrong)
        wrong = {name: row for name, row in wrong.items() if name in previous}
        if wrong:
            name, (count, differing, actual, expected) = next(iter(wrong.items()))
            self.find(
                list(wrong),
                f"{type(optimizer).__name__} changed '{name}' by {actual:.3g} (mean magnitude of "
                f"{count:.0f} sampled elements) where its options, moments and gradient give "
                f"{expected:.3g}; {differing:.0f} of them differ by more than 5 %.",
            )


def _compare(sample: StepSample) -> Tensor:
    """Return how many updates count, how many differ, and the mean magnitudes of both."""
    expected: Any = sample.expected
    actual = sample.before.to(expected.dtype) - sample.after.to(expected.dtype)
    rounding = torch.finfo(sample.before.dtype).eps * sample.before.abs().to(expected.dtype)
    counts = expected.abs() > 32 * rounding
    differs = (actual - expected).abs() > _TOLERANCE * expected.abs() + 4 * rounding
    magnitudes = [(each.abs() * counts).sum() / counts.sum() for each in (actual, expected)]
    return torch.stack([counts.sum(), (counts & differs).sum(), *magnitudes])


class UpdateRoundedAway(Check):
    """Updates are too small for the precision of the weights, which stay as they are.

    Between 1 and 2, bfloat16 has steps of 0.0078: an update of less than half of it changes
    nothing, however often it is made. Looked at in torch's SGD, Adam and AdamW.

    Bug:
        model.to(torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=1e-5)
    Fix: Keep the weights in float32 and compute under `torch.autocast`, or use an optimizer with
        float32 master weights or stochastic rounding.
    Ignore: Never: such weights are not trained.
    """

    def setup(self) -> None:
        self._rates: dict[int, list[Any]] = {}

    def on_step_sampled(self, optimizer: Any, samples: list[StepSample]) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        before, self._rates[id(optimizer)] = self._rates.get(id(optimizer), []), rates
        is_fixed = any(isinstance(rate, Tensor) for rate in rates)
        if not is_fixed and any(a > b for a, b in zip(rates, before, strict=False)):
            self.in_a_row(False, optimizer)  # it rises: updates become larger
        narrow = [s for s in samples if s.expected is not None and s.parameter.dtype in _NARROW]
        rows = []
        for each in narrow:
            should: Any = each.expected != 0
            rows.append(torch.stack([should.sum(), (should & (each.after != each.before)).sum()]))
        if rows:
            parameters = [(each.name, each.parameter.numel()) for each in narrow]
            self.read(rows, self._judge, optimizer, parameters)

    def _judge(
        self, rows: list[list[float]], optimizer: Any, parameters: list[tuple[str, int]]
    ) -> None:
        losses = [(1 - moved / should if should else 0.0) for should, moved in rows]
        whole = sum(size for (_, size), (should, _) in zip(parameters, rows, strict=True) if should)
        lost = sum(each * size for each, (_, size) in zip(losses, parameters, strict=True))
        count = self.in_a_row(whole and lost >= _ROUNDED_AWAY * whole, optimizer)
        if count >= _IN_A_ROW:
            by_name = zip(parameters, losses, strict=True)
            self.find(
                [name for (name, _), each in by_name if each >= _ROUNDED_AWAY],
                f"{lost / whole:.1%} of the elements that {type(optimizer).__name__} should have "
                f"changed did not move, in {count} steps in a row: the updates are smaller than "
                "half of the distance between two numbers of their type.",
            )


class ParameterDoesNotChange(Check):
    """A parameter with gradients is in an optimizer that steps, but no element of it moves.

    Looked at in optimizers other than torch's SGD, Adam and AdamW (see
    `update-differs-from-optimizer`), without hooks of users: for example one that writes to a copy
    of a parameter that is not contiguous. Other parameters of the same optimizer move.

    Bug:
        parameter.data.reshape(-1).add_(update)  # a copy, if the parameter is transposed
    Fix: Update the parameter in place: `parameter.add_(update.view_as(parameter))`.
    Ignore: When the optimizer keeps some parameters constant on purpose.
    """

    def on_step_sampled(self, optimizer: Any, samples: list[StepSample]) -> None:
        if type(optimizer) in EXACT or not steps_alone(optimizer):
            return
        looked_at = [
            each
            for each in samples
            if each.parameter.dtype in _WIDE and not isinstance(each.group.get("lr", 0.0), Tensor)
        ]
        moves = [(each.after != each.before).any() for each in looked_at]
        should = [
            (each.group.get("lr", 0.0) * each.gradient.abs() > 1e-6 * each.before.abs()).any()
            for each in looked_at
        ]
        if looked_at:
            names = [each.name for each in looked_at]
            self.read([*moves, *should], self._judge, optimizer, names)

    def _judge(self, numbers: list[float], optimizer: Any, names: list[str]) -> None:
        moves, should = numbers[: len(names)], numbers[len(names) :]
        if not any(moves):
            return  # this step changes nothing: it only collects gradients
        rows = zip(names, moves, should, strict=True)
        counts = {name: self.in_a_row(would and not moved, name) for name, moved, would in rows}
        self.view.suspects |= {name for name, count in counts.items() if count}
        stuck = [name for name, count in counts.items() if count >= _IN_A_ROW]
        if stuck:
            self.find(
                stuck,
                f"{len(stuck)} of {len(names)} parameters of {type(optimizer).__name__} have not "
                f"changed in {_IN_A_ROW} steps in which they had gradients; the others have.",
            )


class UpdateUsesOldValues(Check):
    """An optimizer goes on with the learning rate, or the number of steps, of an earlier step.

    An update was captured as a graph (or compiled) when the rate was a plain number, so that later
    rates have no effect. Looked at in optimizers with the state of SGD with momentum or of Adam,
    other than torch's own (see `update-differs-from-optimizer`).

    Bug:
        graph = make_fx(update)(parameter, gradient, lr)  # lr is a float
    Fix: Make the learning rate and the step tensors, so that the graph reads them.
    Ignore: Never.
    """

    def setup(self) -> None:
        self._first: dict[int, tuple[float, Any]] = {}  # by parameter: rate and count of steps

    def on_step_sampled(self, optimizer: Any, samples: list[StepSample]) -> None:
        for each in () if type(optimizer) in EXACT else samples:
            rate = each.group.get("lr")
            state = getattr(optimizer, "state", {}).get(each.parameter, {})
            if not isinstance(rate, float) or each.parameter.dtype not in _WIDE:
                continue
            step = state.get("step", 0)
            old_rate, old = self._first.setdefault(id(each.parameter), (rate, step))
            if isinstance(step, Tensor):
                old = step
            if old_rate == rate and old is step:
                continue
            self.view.suspects.add(each.name)
            moved = (each.before - each.after).double()
            directions = [self._direction(each, state, count) for count in (step, old)]
            if all(direction is not None for direction in directions):
                pairs = zip((rate, old_rate), directions, strict=True)
                errors = [(moved - lr * way).norm() / moved.norm() for lr, way in pairs]
                was, now = f"learning rate {old_rate:.3g}", f"{rate:.3g}"
                if old_rate == rate:
                    was, now = f"step {old}", f"{step}"
                self.read(errors, self._judge, optimizer, each.name, was, now)

    def _direction(self, sample: StepSample, state: Any, step: Any) -> Any:
        """Return what the optimizer multiplies by the rate, in this step."""
        names = ("momentum_buffer", "exp_avg", "exp_avg_sq")
        buffer, mean, square = (
            self.sample(state[name]).double() if isinstance(state.get(name), Tensor) else None
            for name in names
        )
        group = sample.group
        if mean is not None and square is not None and "betas" in group:
            one, two = group["betas"]
            if not isinstance(step, Tensor) and not step:
                return None
            return (
                mean / (1 - one**step) / ((square / (1 - two**step)).sqrt() + group.get("eps", 0))
            )
        return buffer

    def _judge(self, errors: list[float], optimizer: Any, name: str, was: str, now: str) -> None:
        if self.in_a_row(errors[1] < 1e-3 and errors[0] > 5e-2, name) >= _IN_A_ROW:
            self.find(
                f"{type(optimizer).__name__} ({name})",
                f"It still changes '{name}' by what the {was} gives, and not {now}, in "
                f"{_IN_A_ROW} steps in a row.",
            )


class OptimizerStateCountsTooManySteps(Check):
    """The optimizer has counted steps that it has not made.

    Adam divides its moments by what it expects after so many steps. If they are zero and the count
    is not, the first updates are too small.

    Bug:
        optimizer.step()  # to create the state
        train(model, optimizer)
    Fix: Remove the synthetic step, or set `step` in the optimizer's state back to 0.
    Ignore: Never.
    """

    def on_step_sampled(self, optimizer: Any, samples: list[StepSample]) -> None:
        rows = []
        for each in samples:
            step, moment = each.state.get("step"), each.state.get("exp_avg")
            if isinstance(step, Tensor) and isinstance(moment, Tensor):
                sums = [x.abs().sum().double() for x in (moment, each.gradient)]
                rows.append(torch.stack([step.to(moment.device).double(), *sums]))
        if rows and self.in_a_row(True, optimizer) <= _IN_A_ROW:
            self.read(rows, self._judge, type(optimizer).__name__)

    def _judge(self, rows: list[list[float]], name: str) -> None:
        rows = [row for row in rows if row[2] > 0]
        if rows and all(step >= 1 and moment == 0 for step, moment, _ in rows):
            self.find(
                name,
                f"{name} had counted {rows[0][0]:.0f} steps, but the moments of all {len(rows)} "
                "parameters that were looked at were zero.",
            )


class _Call(NamedTuple):
    """A call of a module with parameters."""

    module: nn.Module
    has_graph: bool  # of its inputs
    gets: set[int]  # the memory of its inputs
    input_sizes: set[int]
    output_sizes: set[int]


class ParameterWithoutGradient(Check):
    """The graph is cut behind modules that an optimizer should train.

    The first modules of the forward, or all those that get one of the model's inputs, never have
    gradients, while others have: because of `detach`, `.data`, `no_grad`, or checkpointing with
    `use_reentrant=True` of inputs that need no gradients.

    Bug:
        features = self.encoder(x).detach()
        return self.head(features)
    Fix: Remove what cuts the graph, or use `use_reentrant=False`. To freeze the modules, call
        `requires_grad_(False)`.
    Ignore: When the modules are frozen in this way on purpose.
    """

    severity = "warning"

    def setup(self) -> None:
        self._calls: list[_Call] = []
        self._data: set[int] = set()  # memory of the model's inputs
        self._values: dict[int, Tensor] = {}

    def on_module_call(self, call: ModuleCall) -> None:
        if self.view.steps_seen > FIRST_STEPS or len(self._calls) > _MAX_CALLS:
            return
        tensors = list(tensors_in((call.args, call.kwargs)))
        inputs = [tensor for tensor in tensors if tensor.is_floating_point()]
        gets = {key for key in map(_memory, tensors) if key}
        if any(call.module is model for model in self.view.models):
            self._data |= gets
        if _trainable(call.module):
            has_graph = any(tensor.requires_grad for tensor in inputs)
            sizes = {tensor.numel() for tensor in tensors_in(call.output)}
            input_sizes = {tensor.numel() for tensor in inputs}
            self._calls.append(_Call(call.module, has_graph, gets, input_sizes, sizes))

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.view.steps_seen > FIRST_STEPS:
            return
        calls, data, self._calls, self._data = self._calls, self._data, [], set()
        calls = [call for call in calls if _trainable(call.module)]
        own = {id(p) for p in parameters_of(optimizer)}
        for find, steps in ((self._find_cut, _IN_A_ROW), (self._find_entries, _MANY_IN_A_ROW)):
            modules, why = find(calls, data, own) if calls else ([], "")
            key = hash((id(optimizer), steps))
            if not modules:
                self._values.pop(key, None)
            if self.in_a_row(modules, key):
                values = self._values.setdefault(key, self.sample(_trainable(modules[0])[0]))
                if self._counts[key] >= steps:
                    same = (values == self.sample(_trainable(modules[0])[0])).all()
                    self.read([same], self._judge, modules, steps, why)

    def _find_cut(
        self, calls: list[_Call], data: set[int], own: set[int]
    ) -> tuple[list[nn.Module], str]:
        """Return modules whose output reaches the first one with gradients without a graph."""
        number = next((i for i, call in enumerate(calls) if _has_gradients(call.module)), 0)
        cut, target = calls[:number], calls[number]
        is_cut = (
            cut
            and not target.has_graph
            and not target.gets & data
            and target.input_sizes & cut[-1].output_sizes
            and all(id(p) in own for call in cut for p in _trainable(call.module))
        )
        if not is_cut:
            return [], ""
        names = self.view.module_names
        why = f"the output of '{names.get(cut[-1].module)}' reaches '{names.get(target.module)}'"
        modules = [call.module for call in reversed(cut)]
        return list(dict.fromkeys(modules)), f"{why} without a graph"

    def _find_entries(
        self, calls: list[_Call], data: set[int], own: set[int]
    ) -> tuple[list[nn.Module], str]:
        """Return modules without gradients, where an input of the model is passed only to them."""
        learned = [call for call in calls if _has_gradients(call.module)]
        # The model itself gets all inputs, and gives them on.
        used = set[int]().union(*(c.gets for c in learned if c.module not in self.view.models))
        for call in calls if learned else ():
            is_entry = call.gets & data - used and not call.has_graph
            if is_entry and all(id(p) in own and p.grad is None for p in _trainable(call.module)):
                others = [c.module for c in calls if not _has_gradients(c.module)]
                name = self.view.module_names.get(call.module)
                modules = list(dict.fromkeys([call.module, *others]))
                return modules, f"'{name}' is the only module that gets one of the model's inputs"
        return [], ""

    def _judge(self, numbers: list[float], modules: list[nn.Module], steps: int, why: str) -> None:
        if numbers[0]:  # otherwise something else trains them: an average, for example
            names = self.view.module_names
            count = sum(len(_trainable(module)) for module in modules)
            self.find(
                [names.get(module, "a module") for module in modules],
                f"{count} parameters are in an optimizer and had no gradients in {steps} steps in "
                f"a row, while others had: {why}.",
            )


def _has_gradients(module: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in _trainable(module))


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters(recurse=False) if p.requires_grad]


def _memory(tensor: Tensor) -> int:
    """Return what identifies a tensor's memory; 0 for tensors of other kinds."""
    is_plain = tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)
    return tensor.untyped_storage()._cdata if is_plain else 0


class FrozenByNamePrefix(Check):
    """More layers are frozen than were meant, because their names begin alike.

    `name.startswith("layers.1")` is also true for layers 10 to 19. The layers of a list are frozen
    from the first one on, and those whose numbers begin with the same digits.

    Bug:
        for name, p in model.named_parameters():
            if name.startswith("layers.1"):
                p.requires_grad_(False)
    Fix: Compare with the dot: `name.startswith("layers.1.")`.
    Ignore: When these layers are frozen on purpose.
    """

    def on_train_start(self) -> None:
        names = self.view.module_names
        for module in self.view.model.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 10:
                frozen = [i for i, layer in enumerate(module) if _is_frozen(layer)]
                trained = [i for i, layer in enumerate(module) if _is_trained(layer)]
                first = [i for i in frozen if i < 10]
                more = [i for i in frozen if i >= 10]
                expected = [i for i in trained + frozen if i >= 10 and int(str(i)[0]) in first]
                if trained and more and sorted(expected) == more:
                    shown = [f"{names[module]}.{i}".lstrip(".") for i in more]
                    self.find(
                        shown,
                        f"Layers {first} of '{names[module]}' are frozen, and so are {more}, whose "
                        "numbers begin with the same digits.",
                    )


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


class OptimizerMadeAnew(Check):
    """The optimizer is constructed again and again over the same parameters.

    Its moments start from zero each time, so they never average over more than a few steps.

    Bug:
        for x, y in loader:
            optimizer = Adam(model.parameters())
    Fix: Make the optimizer once, before the loop. To change the rate, set `group["lr"]`.
    Ignore: When every step is a training run of its own.
    """

    def setup(self) -> None:
        self._last: dict[int, tuple[Any, int]] = {}  # by parameter: optimizer, weakly, and step

    def on_optimizer_made(self, optimizer: Any) -> None:
        first = next(parameters_of(optimizer), None)
        if first is None or self.view.name_of(first) is None:
            return
        key, step = id(first), self.view.steps_seen
        last, before = self._last.get(key, (lambda: None, step))
        previous: Any = last()
        self._last[key] = weakref.ref(optimizer), step
        is_like_before = previous is not None and type(previous) is type(optimizer)
        is_in_loop = is_like_before and step - before <= 1 and _has_moments(previous)
        if self.in_a_row(is_in_loop, key) >= _MANY_IN_A_ROW:
            name = type(optimizer).__name__
            self.find(
                name,
                f"{name} was made {_MANY_IN_A_ROW + 1} times over the same parameters, each time "
                "after at most one step, which drops its moments.",
            )


def _has_moments(optimizer: Any) -> bool:
    names = ("exp_avg", "momentum_buffer")
    return any(s.get(name) is not None for s in optimizer.state.values() for name in names)


class LearningRateZero(Check):
    """The learning rate of all parameters stays 0: steps have no effect.

    A schedule has ended before training has, or starts from 0 and is never stepped. Warm-up from 0
    and single steps with 0 are no finding.

    Bug:
        LambdaLR(optimizer, lambda step: max(0, 1 - step / 100))  # and 1000 steps of training
    Fix: Give the schedule the number of optimizer steps that are made, and step it.
    Ignore: When nothing is to be trained for a while.
    """

    def setup(self) -> None:
        self._zero: dict[int, int] = {}
        self._positive: dict[int, int] = {}
        self._scheduled, self._scheduler = 0, "no scheduler"

    def on_scheduler_step(self, scheduler: Any) -> None:
        """Count: a schedule by epochs may start with a whole epoch at 0."""
        self._scheduled += 1
        self._scheduler = type(scheduler).__name__

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor) or rate is None or rate > 1e-30:
                self._zero[id(optimizer)] = 0
                self._positive[id(optimizer)] = self._positive.get(id(optimizer), 0) + 1
                return
        count = self._zero[id(optimizer)] = self._zero.get(id(optimizer), 0) + 1
        positive = self._positive.get(id(optimizer), 0)
        may_rise = not positive and self._scheduled < _IN_A_ROW and _has_schedule(optimizer)
        if count < max((20 if may_rise else 2) * FIRST_STEPS, positive // 10):
            return
        when = f", after {positive} steps with a positive one" if positive else " from the start"
        self.find(
            type(optimizer).__name__,
            f"The learning rate of all parameter groups was 0 in {count} steps in a row{when} "
            f"({self._scheduler} was stepped {self._scheduled} times).",
            severity="error" if positive else "warning",
        )


def _has_schedule(optimizer: Any) -> bool:
    return any("initial_lr" in group for group in optimizer.param_groups)


class RequiresGradSetOnModule(Check):
    """`requires_grad` was set on a module, which has no effect.

    A module has no such setting: assigning it makes a new attribute, and its parameters are trained
    as before.

    Bug:
        model.backbone.requires_grad = False
    Fix: Call `module.requires_grad_(False)`, which sets it for all parameters of the module.
    Ignore: When the attribute is your own, with another meaning.
    """

    def on_train_start(self) -> None:
        for module, name in self.view.module_names.items():
            value = vars(module).get("requires_grad")
            other = [p for p in module.parameters() if p.requires_grad is not value]
            if isinstance(value, bool) and other:
                self.find(
                    name or "the model",
                    f"It has the attribute requires_grad = {value}, but {len(other)} of its "
                    f"parameters have requires_grad = {not value}.",
                )


class ForwardIgnoresUpdates(Check):
    """A forward computes with an old copy of a weight that training changes.

    The gradient goes to the weight, but its values are read from a cache (quantised, cast or
    merged) that a step does not refresh. Found by changing weights in a copy of the model.

    Bug:
        if self.cache is None:
            self.cache = quantise(self.weight)
        return x @ self.cache
    Fix: Refresh the copy after each step: compare `weight._version` with that of the copy.
    Ignore: When the forward is not to see the weight.
    """

    is_active = True

    def on_repeat(self, call: RepeatableCall) -> None:
        kinds: dict[type, ParameterPlace] = {}
        for place in self.view.parameters:
            is_layer = isinstance(place.module, nn.Linear | _ConvNd | nn.Embedding)
            if is_layer and place.attribute == "weight" and place.tensor.grad is not None:
                kinds.setdefault(type(place.module), place)
        for place in list(kinds.values())[:_MAX_CHANGED]:
            is_ignored = call.ignores(place.module)
            if is_ignored is not None:
                gradient = self.sample(place.tensor.grad).abs().sum()  # type: ignore[arg-type]
                self.read([is_ignored, gradient], self._judge, place.name)

    def _judge(self, numbers: list[float], name: str) -> None:
        is_ignored, gradient = numbers
        if gradient > 0 and is_ignored:
            self.find(
                name,
                "It has a gradient, but changing all of its values in place leaves the output of "
                "its layer as it was.",
            )


# -- parameters and optimizers ---------------------------------------------------------------------


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters of all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _shapes_of_strangers(view: TrainingView, optimizer: Any) -> set[torch.Size]:
    """Return the shapes of tensors that the model does not have, if none has a gradient."""
    own = {id(place.tensor) for place in view.parameters}
    strangers = [each for each in parameters_of(optimizer) if id(each) not in own]
    has_gradients = any(each.grad is not None for each in strangers)
    return set() if has_gradients else {each.shape for each in strangers}


def _is_held_by_unseen(parameters: Iterable[Tensor], seen: list[Any]) -> bool:
    """Return whether an optimizer that the loop has not stepped yet has one of the parameters."""
    wanted = {id(parameter) for parameter in parameters}
    known = set(map(id, seen))
    optimizers = (o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer))
    others = (each for each in optimizers if id(each) not in known)
    return any(id(parameter) in wanted for each in others for parameter in parameters_of(each))


def _name_in_list(model: nn.Module, parameter: Tensor) -> str | None:
    """Return the name of a parameter whose module is in a plain list or dict of a module.

    Modules in eval mode are others that somebody has hidden there, such as teachers.
    """
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                place = f"{prefix}.{attribute}[{key!r}]".lstrip(".")
                if each is parameter:
                    return place
                for name, own in each.named_parameters() if _is_trained_module(each) else ():
                    if own is parameter:
                        return f"{place}.{name}"
    return None


def _is_trained_module(value: Any) -> bool:
    return isinstance(value, nn.Module) and value.training
