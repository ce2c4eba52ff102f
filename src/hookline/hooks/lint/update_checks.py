"""Rule 1, updates take effect: what has a gradient is in one optimizer, and changes as it says."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.hooks.lint.expected_updates import (
    EXACT,
    SampledUpdate,
    is_computable,
    sample_updates,
    trained_parameters,
)
from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.loss_graph import LossGraph
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


class ParameterNotInOptimizer(Check):
    """A parameter gets gradients, but no optimizer has it, so it keeps its initial value.

    The loss reaches it, and parameters that were used before it (or in the same layer) are trained:
    this is no frozen backbone under a trained head. Also found: modules in a plain Python list,
    which `model.parameters()` does not contain.

    Bug:
        self.blocks = [Block() for _ in range(4)]  # no nn.ModuleList
        optimizer = AdamW(model.parameters())

    Fix:
        Register modules (`nn.ModuleList`), and give the optimizer all parameters. Set
        `requires_grad_(False)` for those that are not to be trained.

    Ignore:
        When you train a part of the model on purpose and leave `requires_grad` of the rest on.
    """

    id = "parameter-not-in-optimizer"
    rule = 1

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._first: dict[int, tuple[str, Tensor, Tensor, int]] = {}  # name, it, values, step
        self._gradients: dict[int, Tensor] = {}

    def on_before_backward(self, view: TrainingView, loss: Any) -> None:
        """Find parameters that the loss reaches, in the first steps."""
        if view.steps_seen > _IN_A_ROW or not isinstance(loss, Tensor) or loss.grad_fn is None:
            return
        graph = LossGraph(loss)
        held = view.optimized()
        if not graph.is_complete or graph.leaves.keys() <= held.keys():
            return
        if graph.leaves.keys() & held.keys():
            suspected = graph.reached_after(set(held))
        else:
            suspected = set(graph.leaves)  # the loss reaches nothing that an optimizer has
        names = {id(place.tensor): place.name for place in view.parameters}
        in_order = [*names, *(key for key in graph.leaves if key not in names)]
        for key in in_order:
            if key not in suspected or key in held or key in self._first:
                continue
            name = names.get(key) or _name_in_list(view.model, graph.leaves[key])
            if name is not None:
                values = view.sample(graph.leaves[key])
                self._first[key] = name, graph.leaves[key], values, view.steps_seen

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Note the gradients."""
        if self._first:  # `optimizer-has-foreign-parameters` finds those with the same shape
            shapes = {each.shape for each in _gradientless_strangers(view, optimizer)}
            kept = {key: row for key, row in self._first.items() if row[1].shape not in shapes}
            self._first = kept
        for key, (_, parameter, _, _) in self._first.items() if view.is_due else ():
            if parameter.grad is not None:
                self._gradients[key] = view.sample(parameter.grad).abs().sum()

    def on_step_end(self, view: TrainingView) -> None:
        """Compare with the first values, after some steps."""
        gradients, self._gradients = self._gradients, {}
        if view.steps_seen > FIRST_STEPS:
            self._first.clear()
        if not self._first:
            return
        held = view.optimized()
        for key in [key for key in self._first if key in held]:
            del self._first[key]
        ripe = {
            key: (name, parameter, values)
            for key, (name, parameter, values, step) in self._first.items()
            if view.steps_seen - step >= _IN_A_ROW - 1 and key in gradients
        }
        if ripe:
            same = [(view.sample(p) == values).all() for _, p, values in ripe.values()]
            numbers = [*same, *(gradients[key] for key in ripe)]
            view.read(numbers, self._judge, view, [(n, p) for n, p, _ in ripe.values()])

    def _judge(
        self, numbers: list[float], view: TrainingView, parameters: list[tuple[str, Tensor]]
    ) -> None:
        count = len(parameters)
        rows = zip(parameters, numbers[:count], numbers[count:], strict=True)
        stuck = [(each, gradient) for each, same, gradient in rows if same and gradient > 0]
        if not stuck or _is_held_by_unseen([p for (_, p), _ in stuck], view.optimizers):
            return
        held = view.optimized()
        trained = [e for e in view.parameters if id(e.tensor) in held and e.tensor.requires_grad]
        if any(each.tensor.grad is not None for each in trained):
            stuck = _without_adapted(view, stuck, trained)
        if not stuck:
            return
        missing = sum(parameter.numel() for (_, parameter), _ in stuck)
        names = [name for (name, _), _ in stuck]
        self.find(
            view,
            names,
            f"{len(names)} parameters ({missing:,} elements) get gradients (sum of magnitudes of "
            f"'{names[0]}': {stuck[0][1]:.3g}), but no optimizer has them, and they have not "
            f"changed in {_IN_A_ROW} steps.",
            "Give them to the optimizer. Modules belong in an nn.ModuleList, not in a list; an "
            "optimizer is made after the model is complete. If they are to stay as they are, call "
            "requires_grad_(False).",
        )


def _without_adapted(view: TrainingView, stuck: list[Any], trained: list[ParameterPlace]) -> Any:
    """Return the untrained parameters without those beside which adapters or biases are trained.

    These are many, compared with the trained ones, and no others of their kind are trained.
    """
    size = sum(each.tensor.numel() for each in trained)
    if sum(parameter.numel() for (_, parameter), _ in stuck) <= _FEW_UNTRAINED * size:
        return stuck
    kinds = {(type(each.module), each.attribute) for each in trained}
    own = {id(each.tensor): (type(each.module), each.attribute) for each in view.parameters}
    listed = [row for row in stuck if id(row[0][1]) not in own]  # modules in plain lists
    alike = [row for row in stuck if own.get(id(row[0][1])) in kinds]
    is_few = sum(parameter.numel() for (_, parameter), _ in alike) <= _MAX_UNTRAINED * size
    return [*listed, *alike] if is_few else listed


class OptimizerHasForeignParameters(Check):
    """An optimizer steps tensors that are no parameters of the model, and get no gradients.

    The model's parameters were replaced after the optimizer was made: by wrapping, moving,
    `to_empty`, untying, or a new head. Training has no effect on the new ones.

    Bug:
        optimizer = AdamW(model.parameters())
        model.head = nn.Linear(64, 10)

    Fix:
        Make the optimizer after the model has its final parameters.

    Ignore:
        When the optimizer also has another model that gets no gradients at the moment.
    """

    id = "optimizer-has-foreign-parameters"
    rule = 1

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._values: dict[int, tuple[Tensor, int]] = {}  # of parameters that no optimizer has
        self._replaced: list[tuple[ParameterPlace, Tensor]] = []
        self._optimizer: Any = None

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Look for tensors without gradients whose shape a parameter without optimizer has."""
        self._replaced = []
        if not view.is_due:
            return
        shapes = {tuple(each.shape) for each in _gradientless_strangers(view, optimizer)}
        held = view.optimized() if shapes else {}
        for place in view.parameters if shapes else ():
            tensor = place.tensor
            if tensor.grad is None or id(tensor) in held or tuple(tensor.shape) not in shapes:
                continue
            self._values.setdefault(id(tensor), (view.sample(tensor), view.steps_seen))
            self._replaced.append((place, view.sample(tensor.grad).abs().sum()))
        self._optimizer = optimizer

    def on_step_end(self, view: TrainingView) -> None:
        """Compare the values with those of an earlier step."""
        replaced, self._replaced = self._replaced, []
        ripe = [
            (place, gradient)
            for place, gradient in replaced
            if self._values[id(place.tensor)][1] < view.steps_seen
        ]
        if ripe:
            same = [(view.sample(p.tensor) == self._values[id(p.tensor)][0]).all() for p, _ in ripe]
            numbers = [*same, *(gradient for _, gradient in ripe)]
            view.read(numbers, self._judge, view, [place for place, _ in ripe], self._optimizer)

    def _judge(
        self, numbers: list[float], view: TrainingView, places: list[ParameterPlace], optimizer: Any
    ) -> None:
        rows = zip(places, numbers, numbers[len(places) :], strict=False)
        stuck = [place for place, same, gradient in rows if same and gradient > 0]
        if stuck and not _is_held_by_unseen([place.tensor for place in stuck], view.optimizers):
            strangers = len(_gradientless_strangers(view, optimizer))
            self.find(
                view,
                [place.name for place in stuck],
                f"{type(optimizer).__name__} has {strangers} tensors that are not in the model and "
                f"get no gradients, while {len(stuck)} parameters of their shapes get gradients, "
                "are in no optimizer, and do not change: they were replaced after the optimizer "
                "was made.",
                "Make the optimizer after the last change of the model's parameters (wrapping, "
                "moving, new layers), or add them with optimizer.add_param_group.",
            )


class ParameterInTwoOptimizers(Check):
    """Two optimizers step the same parameter with the same gradient.

    It is changed twice in each step, as with a higher learning rate, and each optimizer's moments
    belong to weights that the other one has moved.

    Bug:
        body = AdamW(model.parameters())
        head = AdamW(model.head.parameters())

    Fix:
        Give each parameter to one optimizer.

    Ignore:
        When both updates are meant.
    """

    id = "parameter-in-two-optimizers"
    rule = 1

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._used: dict[int, tuple[Any, int]] = {}  # by parameter: optimizer, backwards until then
        self._twice: dict[str, tuple[Any, Any]] = {}
        self._steps = self._backwards = 0

    def on_before_backward(self, view: TrainingView, loss: Any) -> None:
        """Count: gradients are others afterwards."""
        self._backwards += 1

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Note which gradients an optimizer uses that another one has used."""
        if not view.is_due or len(view.optimizers) < 2:
            return
        for parameter in _parameters_of(optimizer):
            if parameter.grad is None or not parameter.requires_grad:
                continue
            used = self._used.get(id(parameter))
            if used and used[0] is not optimizer and used[1] == self._backwards:
                self._twice[view.name_of(parameter) or "a parameter"] = used[0], optimizer
            self._used[id(parameter)] = optimizer, self._backwards

    def on_step_end(self, view: TrainingView) -> None:
        """Report what was stepped twice in two steps in a row."""
        twice, self._twice, self._used = self._twice, {}, {}
        self._steps = self._steps + 1 if twice else 0
        if self._steps >= 2:
            first, second = next(iter(twice.values()))
            self.find(
                view,
                list(twice),
                f"{type(first).__name__} and {type(second).__name__} have stepped {len(twice)} "
                "parameters with the same gradient, in 2 steps in a row.",
                "Give each parameter to one optimizer only.",
            )


class UpdateDiffersFromOptimizer(Check):
    """A step of SGD, Adam or AdamW changed a parameter by something else than it should.

    From learning rate, options, moments and gradient follows what these optimizers subtract. A
    compiled optimizer that keeps an old learning rate, or a kernel that writes to a copy of memory
    that is not contiguous, subtracts something else, or nothing.

    Bug:
        step = torch.compile(optimizer.step)  # with a learning rate that was constant when compiled

    Fix:
        Make the learning rate a tensor in compiled optimizers; try `foreach=False, fused=False`.

    Ignore:
        When something changes weights within the step on purpose.
    """

    id = "update-differs-from-optimizer"
    rule = 1

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._updates: list[SampledUpdate] = []
        self._before: dict[int, set[str]] = {}  # by optimizer: what differed in the step before

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Compute the updates."""
        self._updates = []
        if view.is_due and is_computable(optimizer):
            again = self._before.get(id(optimizer), set())
            self._updates = sample_updates(view, optimizer, _WIDE, again)

    def on_after_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Compare them with the changes."""
        updates, self._updates = self._updates, []
        rows = [
            (each.name, _compare(each, view.sample(each.parameter)))
            for each in updates
            if each.gradient is each.parameter.grad and each.gradient._version == each.version
        ]
        if rows:
            numbers = [row for _, row in rows]
            view.read(numbers, self._judge, view, optimizer, [name for name, _ in rows])

    def _judge(
        self, rows: list[list[float]], view: TrainingView, optimizer: Any, names: list[str]
    ) -> None:
        wrong = {
            name: row
            for name, row in zip(names, rows, strict=True)
            if row[0] and row[1] > row[0] / 2
        }
        previous = self._before.get(id(optimizer), set())
        self._before[id(optimizer)] = set(wrong)
        wrong = {name: row for name, row in wrong.items() if name in previous}
        if not wrong:
            return
        name, (count, differing, actual, expected) = next(iter(wrong.items()))
        self.find(
            view,
            list(wrong),
            f"{type(optimizer).__name__} changed '{name}' by {actual:.3g} (mean magnitude of "
            f"{count:.0f} sampled elements) where its options, moments and gradient give "
            f"{expected:.3g}; {differing:.0f} of them differ by more than 5 %.",
            "If the optimizer is compiled, make its learning rate a tensor. Otherwise try "
            "foreach=False, fused=False, and make the parameter contiguous.",
        )


def _compare(update: SampledUpdate, after: Tensor) -> Tensor:
    """Return how many updates count, how many differ, and the mean magnitudes of both."""
    expected = update.expected
    actual = update.before.to(expected.dtype) - after.to(expected.dtype)
    rounding = torch.finfo(update.before.dtype).eps * update.before.abs().to(expected.dtype)
    counts = expected.abs() > 32 * rounding
    differs = (actual - expected).abs() > _TOLERANCE * expected.abs() + 4 * rounding
    magnitudes = [(each.abs() * counts).sum() / counts.sum() for each in (actual, expected)]
    return torch.stack([counts.sum(), (counts & differs).sum(), *magnitudes])


class UpdateRoundedAway(Check):
    """Updates are too small for the precision of the weights, which stay as they are.

    Between 1 and 2, bfloat16 has steps of 0.0078: an update of less than half of it changes
    nothing, however often it is made. Found if nine of ten elements of all parameters in bfloat16
    or float16 do not move, in three steps in a row in which the learning rate does not rise.

    Bug:
        model.to(torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=1e-5)

    Fix:
        Keep the weights in float32 and compute under `torch.autocast`, or use an optimizer with
        float32 master weights or stochastic rounding.

    Ignore:
        Never: such weights are not trained.
    """

    id = "update-rounded-away"
    rule = 1

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._updates: list[SampledUpdate] = []
        self._rates: dict[int, list[Any]] = {}
        self._in_a_row: dict[int, int] = {}

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Compute the updates."""
        if not view.is_due or not is_computable(optimizer):
            return
        self._updates = sample_updates(view, optimizer, _NARROW)
        rates = [group["lr"] for group in optimizer.param_groups]
        before = self._rates.get(id(optimizer))
        self._rates[id(optimizer)] = rates
        is_float = not any(isinstance(rate, Tensor) for rate in rates)
        if before is None or (is_float and any(a > b for a, b in zip(rates, before, strict=False))):
            self._in_a_row[id(optimizer)] = 0

    def on_after_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Count elements that should have moved, and have."""
        updates, self._updates = self._updates, []
        if updates:
            rows = []
            for update in updates:
                should = update.expected != 0
                has_moved = view.sample(update.parameter) != update.before
                rows.append(torch.stack([should.sum(), (should & has_moved).sum()]))
            given = [(each.name, each.parameter.numel()) for each in updates]
            view.read(rows, self._judge, view, optimizer, given)

    def _judge(
        self,
        rows: list[list[float]],
        view: TrainingView,
        optimizer: Any,
        parameters: list[tuple[str, int]],
    ) -> None:
        shares = [(1 - moved / should if should else 0.0) for should, moved in rows]
        whole = sum(size for (_, size), (should, _) in zip(parameters, rows, strict=True) if should)
        lost = sum(share * size for share, (_, size) in zip(shares, parameters, strict=True))
        count = self._in_a_row.get(id(optimizer), 0) + 1
        self._in_a_row[id(optimizer)] = count = (
            count if whole and lost >= _ROUNDED_AWAY * whole else 0
        )
        if count >= _IN_A_ROW:
            rows_by_name = zip(parameters, shares, strict=True)
            names = [name for (name, _), share in rows_by_name if share >= _ROUNDED_AWAY]
            self.find(
                view,
                names,
                f"{lost / whole:.1%} of the elements that {type(optimizer).__name__} should have "
                f"changed did not move, in {count} steps in a row: the updates are smaller than "
                "half of the distance between two numbers of their type.",
                "Keep weights in float32 and use autocast, or an optimizer with float32 master "
                "weights or stochastic rounding.",
            )


class ParameterDoesNotChange(Check):
    """A parameter with gradients is in an optimizer that steps, but no element of it moves.

    Looked at in optimizers other than torch's SGD, Adam and AdamW (see
    `update-differs-from-optimizer` for these): for example one that writes to a copy of a parameter
    that is not contiguous in memory. Other parameters of the same optimizer move.

    Bug:
        parameter.data.reshape(-1).add_(update)  # a copy, if the parameter is transposed

    Fix:
        Update the parameter in place: `parameter.add_(update.view_as(parameter))`.

    Ignore:
        When the optimizer keeps some parameters constant on purpose.
    """

    id = "parameter-does-not-change"
    rule = 1

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._before: list[tuple[str, Tensor, Tensor, Tensor]] = []
        self._stuck: dict[str, int] = {}

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Keep some elements, and whether a plain step would move them."""
        self._before = []
        if not view.is_due or type(optimizer) in EXACT:
            return
        stuck = {name for name, count in self._stuck.items() if count}
        for name, parameter, group in trained_parameters(view, optimizer, stuck):
            lr = group.get("lr", 0.0)
            if (
                parameter.dtype in _WIDE
                and parameter.grad is not None
                and not isinstance(lr, Tensor)
            ):
                values = view.sample(parameter)
                change = lr * view.sample(parameter.grad).abs()
                would_move = (change > 1e-6 * values.abs()).any()
                self._before.append((name, parameter, values, would_move))

    def on_after_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Compare."""
        before, self._before = self._before, []
        if before:
            moves = [(view.sample(p) != values).any() for _, p, values, _ in before]
            numbers = [*moves, *(would_move for *_, would_move in before)]
            view.read(numbers, self._judge, view, optimizer, [name for name, *_ in before])

    def _judge(
        self, numbers: list[float], view: TrainingView, optimizer: Any, names: list[str]
    ) -> None:
        moves, should = numbers[: len(names)], numbers[len(names) :]
        if not any(moves):
            return  # this step changes nothing: it only collects gradients
        for name, moved, would_move in zip(names, moves, should, strict=True):
            self._stuck[name] = self._stuck.get(name, 0) + 1 if would_move and not moved else 0
        stuck = [name for name in names if self._stuck[name] >= _IN_A_ROW]
        if stuck:
            self.find(
                view,
                stuck,
                f"{len(stuck)} of {len(names)} parameters of {type(optimizer).__name__} have not "
                f"changed in {_IN_A_ROW} steps in which they had gradients; the others have.",
                "See that the optimizer changes the parameter in place, and not a copy of it (of "
                "memory that is not contiguous, for example).",
            )


class OptimizerStateCountsTooManySteps(Check):
    """The optimizer has counted steps that it has not made.

    Adam divides its moments by what it expects after so many steps. If they are zero and the count
    is not, the first updates are too small.

    Bug:
        optimizer.step()  # to create the state
        train(model, optimizer)

    Fix:
        Remove the synthetic step, or set `step` in the optimizer's state back to 0.

    Ignore:
        Never.
    """

    id = "optimizer-state-counts-too-many-steps"
    rule = 1

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._seen: dict[int, int] = {}

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Look at counts and moments in the first steps."""
        count = self._seen[id(optimizer)] = self._seen.get(id(optimizer), 0) + 1
        if count > _IN_A_ROW or not hasattr(optimizer, "state"):
            return
        rows = []
        for _, parameter, _ in trained_parameters(view, optimizer):
            state = optimizer.state.get(parameter, {})
            step, moment, gradient = state.get("step"), state.get("exp_avg"), parameter.grad
            if isinstance(step, Tensor) and isinstance(moment, Tensor) and gradient is not None:
                sums = [view.sample(each).abs().sum().double() for each in (moment, gradient)]
                rows.append(torch.stack([step.to(moment.device).double(), *sums]))
        if rows:
            view.read(rows, self._judge, view, optimizer)

    def _judge(self, rows: list[list[float]], view: TrainingView, optimizer: Any) -> None:
        rows = [row for row in rows if row[2] > 0]
        if rows and all(step >= 1 and moment == 0 for step, moment, _ in rows):
            name = type(optimizer).__name__
            self.find(
                view,
                name,
                f"{name} had counted {rows[0][0]:.0f} steps, but the moments of all {len(rows)} "
                "parameters that were looked at were zero.",
                "Make no step without gradients before training, or set `step` in the optimizer's "
                "state to 0.",
            )


class _Call(NamedTuple):
    """A call of a module with parameters."""

    module: nn.Module
    has_graph: bool  # of its inputs
    inputs: set[int]  # their memory
    input_sizes: set[int]
    output_sizes: set[int]
    gets: set[int]  # the memory of all its inputs, integers included


class ParameterWithoutGradient(Check):
    """The graph is cut behind modules that an optimizer should train.

    The first modules of the forward never get gradients, though an optimizer has them. The first
    one that gets gradients is called with a tensor that has no graph, is as large as the output
    before it, and is no input of the model: because of `detach`, `.data`, `no_grad`, or
    checkpointing with `use_reentrant=True` of inputs that need no gradients. Or an input of the
    model is given only to modules that never have gradients, while others have: nothing is learned
    from it.

    Bug:
        features = self.encoder(x).detach()
        return self.head(features)

    Fix:
        Remove the `detach`, or use `use_reentrant=False`. To freeze the module, call
        `requires_grad_(False)`.

    Ignore:
        When the modules are frozen in this way on purpose.
    """

    id = "parameter-without-gradient"
    rule = 1
    severity = "warning"

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._calls: list[_Call] = []
        self._data: set[int] = set()  # memory of the model's inputs
        self._in_a_row: dict[int, int] = {}
        self._values: dict[int, Tensor] = {}
        self._unlearned: dict[
            int, tuple[int, Tensor | None]
        ] = {}  # by module: steps, and its values

    def on_module_call(self, view: TrainingView, call: ModuleCall) -> None:
        """Note the calls of modules with parameters, in order."""
        if view.steps_seen > FIRST_STEPS or len(self._calls) > _MAX_CALLS:
            return
        inputs = [t for t in tensors_in((call.args, call.kwargs)) if t.is_floating_point()]
        memory = {key for key in map(_memory, inputs) if key}
        gets = {key for key in map(_memory, tensors_in((call.args, call.kwargs))) if key}
        if any(call.module is model for model in view.models):
            self._data |= gets
        if any(p.requires_grad for p in call.module.parameters(recurse=False)):
            has_graph = any(tensor.requires_grad for tensor in inputs)
            sizes = {tensor.numel() for tensor in tensors_in(call.output)}
            input_sizes = {tensor.numel() for tensor in inputs}
            found = _Call(call.module, has_graph, memory, input_sizes, sizes, gets)
            self._calls.append(found)

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Look for first modules without gradients before one with gradients."""
        calls, data, self._calls, self._data = self._calls, self._data, [], set()
        if not calls:
            return
        own = {id(p) for p in _parameters_of(optimizer)}
        self._look_at_entries(view, calls, data, own)
        cut, target = _split_by_gradients(calls)
        is_cut = (
            cut
            and target is not None
            and not target.has_graph
            and not target.inputs & data
            and target.input_sizes & cut[-1].output_sizes
            and all(id(p) in own for call in cut for p in _trainable(call.module))
        )
        key = id(optimizer)
        self._in_a_row[key] = self._in_a_row.get(key, 0) + 1 if is_cut else 0
        if not is_cut:
            self._values.pop(key, None)
            return
        last = _trainable(cut[-1].module)[0]
        values = self._values.setdefault(key, view.sample(last))
        if self._in_a_row[key] >= _IN_A_ROW:
            same = (values == view.sample(last)).all()
            modules = list(dict.fromkeys(call.module for call in cut))
            view.read([same], self._judge, view, modules, target)

    def _look_at_entries(
        self, view: TrainingView, calls: list[_Call], data: set[int], own: set[int]
    ) -> None:
        """Look for inputs of the model that only modules without gradients get."""
        learned = [call for call in calls if _has_gradients(call.module)]
        used = set[int]().union(*(call.gets for call in learned))
        entries = {call.module for call in calls if call.gets & data - used and not call.has_graph}
        for module in entries if learned else ():
            parameters = _trainable(module)
            is_own = bool(parameters) and all(id(p) in own and p.grad is None for p in parameters)
            count, values = self._unlearned.get(id(module), (0, None))
            if not is_own or values is None:
                fresh = (1, view.sample(parameters[0])) if is_own else (0, None)
                self._unlearned[id(module)] = fresh
                continue
            self._unlearned[id(module)] = (count + 1, values)
            if count + 1 >= _MANY_IN_A_ROW:
                same = (values == view.sample(parameters[0])).all()
                unlearned = [c.module for c in calls if not _has_gradients(c.module)]
                view.read([same], self._judge_entry, view, module, list(dict.fromkeys(unlearned)))

    def _judge_entry(
        self, numbers: list[float], view: TrainingView, entry: nn.Module, modules: list[nn.Module]
    ) -> None:
        if not numbers[0]:
            return
        names = view.module_names
        self.find(
            view,
            [names.get(module, "a module") for module in modules],
            f"'{names.get(entry)}' is the only module that gets one of the model's inputs, and is "
            f"in an optimizer, but it had no gradients in {_MANY_IN_A_ROW} steps in a row, while "
            "others had.",
            "Remove detach, .data or no_grad behind it. If it is to be frozen, call "
            "requires_grad_(False).",
        )

    def _judge(
        self, numbers: list[float], view: TrainingView, modules: list[nn.Module], target: _Call
    ) -> None:
        if not numbers[0]:
            return  # something else trains them: an average, for example
        names = view.module_names
        count = sum(len(_trainable(module)) for module in modules)
        self.find(
            view,
            [names.get(module, "a module") for module in reversed(modules)],
            f"{count} parameters are in an optimizer and have no gradients in {_IN_A_ROW} steps in "
            f"a row: the output of '{names.get(modules[-1])}' reaches "
            f"'{names.get(target.module)}' without a graph.",
            "Remove detach, .data or no_grad between the two; use checkpoint(..., "
            "use_reentrant=False). If they are to be frozen, call requires_grad_(False).",
        )


def _split_by_gradients(calls: list[_Call]) -> tuple[list[_Call], _Call | None]:
    """Return the calls before the first one whose module has gradients, and that one."""
    for i, call in enumerate(calls):
        if any(parameter.grad is not None for parameter in _trainable(call.module)):
            return calls[:i], call
    return calls, None


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

    Fix:
        Compare with the dot: `name.startswith("layers.1.")`.

    Ignore:
        When these layers are frozen on purpose.
    """

    id = "frozen-by-name-prefix"
    rule = 1

    def on_train_start(self, view: TrainingView) -> None:
        """Look at the layers of each list."""
        names = view.module_names
        for module in view.model.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 10:
                frozen = [i for i, layer in enumerate(module) if _is_frozen(layer)]
                trained = [i for i, layer in enumerate(module) if _is_trained(layer)]
                first = [i for i in frozen if i < 10]
                more = [i for i in frozen if i >= 10]
                expected = [i for i in trained + frozen if i >= 10 and int(str(i)[0]) in first]
                if trained and more and sorted(expected) == more:
                    shown = [f"{names[module]}.{i}".lstrip(".") for i in more]
                    self.find(
                        view,
                        shown,
                        f"Layers {first} of '{names[module]}' are frozen, and so are {more}, whose "
                        "numbers begin with the same digits.",
                        "Compare names with the dot behind the number: 'layers.1.'.",
                    )


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


class FrozenParameterChanges(Check):
    """A parameter was frozen, but the optimizer goes on with its last gradient.

    `requires_grad_(False)` keeps `.grad` as it is. An optimizer that has the parameter uses it in
    every step, with momentum and weight decay.

    Bug:
        model.encoder.requires_grad_(False)  # after backward has run
        optimizer.step()

    Fix:
        Set `.grad` to None when you freeze a parameter, or call `zero_grad(set_to_none=True)`.

    Ignore:
        When you compute this gradient yourself.
    """

    id = "frozen-parameter-changes"
    rule = 1

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._gradients: dict[int, tuple[Tensor, int]] = {}  # of frozen parameters, and versions
        self._before: list[tuple[str, Tensor, Tensor]] = []

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Look for gradients of frozen parameters that are those of the step before."""
        self._before = []
        parameters = list(_parameters_of(optimizer)) if view.is_due else []
        if not any(parameter.requires_grad for parameter in parameters):
            return
        for parameter in parameters:
            if parameter.requires_grad or parameter.grad is None:
                continue
            gradient, version = self._gradients.get(id(parameter), (None, 0))
            if gradient is parameter.grad and version == parameter.grad._version:
                name = view.name_of(parameter) or "a parameter"
                self._before.append((name, parameter, view.sample(parameter)))
            self._gradients[id(parameter)] = parameter.grad, parameter.grad._version

    def on_after_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """See whether they have changed."""
        before, self._before = self._before, []
        if before:
            moves = [(view.sample(p) - values).abs().max() for _, p, values in before]
            view.read(moves, self._judge, view, [name for name, *_ in before])

    def _judge(self, moves: list[float], view: TrainingView, names: list[str]) -> None:
        changed = [(name, move) for name, move in zip(names, moves, strict=True) if move > 0]
        if changed:
            self.find(
                view,
                [name for name, _ in changed],
                f"{len(changed)} parameters with requires_grad=False have changed (by up to "
                f"{max(move for _, move in changed):.3g}) with the gradient of an earlier step.",
                "Set their .grad to None when you freeze them: optimizer.zero_grad("
                "set_to_none=True).",
            )


class OptimizerMadeAnew(Check):
    """The optimizer is constructed again and again over the same parameters.

    Its moments start from zero each time, so they never average over more than a few steps.

    Bug:
        for x, y in loader:
            optimizer = Adam(model.parameters())

    Fix:
        Make the optimizer once, before the loop. To change the rate, set `group["lr"]`.

    Ignore:
        When every few steps are a training of their own.
    """

    id = "optimizer-made-anew"
    rule = 1

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._last: dict[int, tuple[Any, int, int]] = {}  # by parameter: optimizer, step, how often
        self._values: dict[int, Tensor] = {}

    def on_optimizer_made(self, view: TrainingView, optimizer: Any) -> None:
        """Compare with the optimizer before that had the same first parameter."""
        first = next(_parameters_of(optimizer), None)
        if first is None or view.name_of(first) is None:
            return
        last, step, count = self._last.get(id(first), (_nothing, 0, 0))
        previous = last()
        is_soon = view.steps_seen - step <= FIRST_STEPS
        had_moments = previous is not None and _has_moments(previous)
        count = count + 1 if is_soon and had_moments and type(previous) is type(optimizer) else 0
        self._last[id(first)] = weakref.ref(optimizer), view.steps_seen, count
        if 0 < count <= _IN_A_ROW:  # its steps may be no events: the loop has another optimizer
            note = functools.partial(_keep_sample, self._values, view)
            note.__module__ = __name__
            optimizer.register_step_post_hook(note)
        values = self._values.get(id(first))
        if count >= _IN_A_ROW and values is not None:
            same = (view.sample(first) == values).all()
            view.read([same], self._judge, view, type(optimizer).__name__, count)

    def _judge(self, numbers: list[float], view: TrainingView, name: str, count: int) -> None:
        if numbers[0]:
            self.find(
                view,
                name,
                f"{name} was made {count + 1} times over the same parameters, each time after at "
                f"most {FIRST_STEPS} steps, which drops its moments.",
                "Make the optimizer once, before the loop.",
            )


def _keep_sample(
    values: dict[int, Tensor], view: TrainingView, optimizer: Any, args: Any, kwargs: Any
) -> None:
    """Keep some weights after a step."""
    first = next(_parameters_of(optimizer))
    values[id(first)] = view.sample(first)


def _nothing() -> None:
    return None


def _has_moments(optimizer: Any) -> bool:
    names = ("exp_avg", "momentum_buffer")
    return any(s.get(name) is not None for s in optimizer.state.values() for name in names)


class LearningRateZero(Check):
    """The learning rate of all parameters stays 0: steps have no effect.

    A schedule has ended before training has, or starts from 0 and is never stepped. Warm-up from 0
    and single steps with 0 are no finding.

    Bug:
        LambdaLR(optimizer, lambda step: max(0, 1 - step / 100))  # and 1000 steps of training

    Fix:
        Give the schedule the number of optimizer steps that are made, and step it.

    Ignore:
        When nothing is to be trained for a while.
    """

    id = "learning-rate-zero"
    rule = 1

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._zero: dict[int, int] = {}
        self._positive: dict[int, int] = {}
        self._scheduled = 0

    def on_scheduler_step(self, view: TrainingView, scheduler: Any) -> None:
        """Count: a schedule by epochs may start with a whole epoch at 0."""
        self._scheduled += 1

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Count steps with a rate of 0."""
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
            view,
            type(optimizer).__name__,
            f"The learning rate of all parameter groups was 0 in {count} steps in a row{when}.",
            "Give the schedule the number of optimizer steps that training makes, and step it once "
            "per optimizer step.",
            severity="error" if positive else "warning",
        )


def _has_schedule(optimizer: Any) -> bool:
    return any("initial_lr" in group for group in optimizer.param_groups)


# -- parameters and optimizers ---------------------------------------------------------------------


def _parameters_of(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _gradientless_strangers(view: TrainingView, optimizer: Any) -> list[Tensor]:
    """Return tensors of an optimizer that the model does not have, if none has a gradient."""
    own = {id(place.tensor) for place in view.parameters}
    strangers = [each for each in _parameters_of(optimizer) if id(each) not in own]
    return [] if any(each.grad is not None for each in strangers) else strangers


def _is_held_by_unseen(parameters: Iterable[Tensor], seen: list[Any]) -> bool:
    """Return whether an optimizer that the loop has not stepped yet has one of the parameters."""
    wanted = {id(parameter) for parameter in parameters}
    known = set(map(id, seen))
    optimizers = (o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer))
    others = (each for each in optimizers if id(each) not in known)
    return any(id(parameter) in wanted for each in others for parameter in _parameters_of(each))


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


UPDATE_CHECKS = (
    ParameterNotInOptimizer,
    OptimizerHasForeignParameters,
    ParameterInTwoOptimizers,
    UpdateDiffersFromOptimizer,
    UpdateRoundedAway,
    ParameterDoesNotChange,
    OptimizerStateCountsTooManySteps,
    ParameterWithoutGradient,
    FrozenByNamePrefix,
    FrozenParameterChanges,
    OptimizerMadeAnew,
    LearningRateZero,
)
