"""TrainingView: what the checks of `Lint` look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookline.hooks.lint.rank_exchange import RankExchange
from hookline.loop.loop import loop_of
from hookline.loop.model_watch import is_compiled_in_place, models_in
from hookline.tensors.device_numbers import read_tensors
from hookline.tensors.name_patterns import module_places
from hookline.tensors.parameter_names import named_parameters
from hookline.tensors.sharded import stored_values

FIRST_STEPS = 10
"""All of these are looked at, then a few, then each hundredth."""

_LATER = (16, 24, 32, 48, 64)
_EVERY = 100
_SAMPLE = 64  # elements of a tensor

Judge = Callable[..., None]


@dataclass(frozen=True, eq=False)
class ParameterPlace:
    """A parameter of the model, and the module that has it."""

    name: str
    tensor: nn.Parameter
    module: nn.Module
    attribute: str


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return a parameter that a module has itself; None if it has none of this name.

    Reading the attribute computes a parametrized weight, and spectral norm changes its buffers.
    """
    parameters: dict[str, nn.Parameter | None] = vars(module)["_parameters"]
    return parameters.get(name)


class TrainingView:
    """Where training stands, and the reading of tensors for all checks at once.

    Attributes:
        trainer: what hooks get as `trainer`.
        model: the model, or a `ModelGroup` of several.
        models: the models of a group, or the one model.
        optimizers: the optimizers of the loop.
        step: the number of the step in progress, from 1; in `on_step_end` of the one that is done.
        steps_seen: how many steps this process has seen, with the one in progress.
        is_due: whether the step in progress is looked at closely.
        is_evaluating: whether the loop says that it validates.
        rank: of this process.
        ranks: how many processes train together.
        suspects: names of parameters that are sampled in each due step.
    """

    def __init__(self, trainer: Any, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self.trainer, self.model, self.optimizers = trainer, model, list(optimizers)
        self.models, self._loop = models_in(model), loop_of(trainer)
        self._exchange = RankExchange()
        self.rank, self.ranks = self._exchange.rank, self._exchange.ranks
        self.step, self.steps_seen, self.is_due = 1, 1, True
        self._close_until = FIRST_STEPS
        self.suspects: set[str] = set()
        self._places: list[ParameterPlace] = []
        self._ids: tuple[int, ...] = ()
        self._ids_of = 0  # the step in which they were collected
        self._reads: list[tuple[list[Any], Judge, tuple[Any, ...]]] = []
        self._exchanges: dict[str, tuple[Any, Judge]] = {}

    # -- where training stands ---------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Set the step in progress."""
        self.step = step
        seen = self.steps_seen
        self.is_due = seen <= self._close_until or seen in _LATER or seen % _EVERY == 0

    def end_step(self) -> None:
        """Count a step."""
        self.steps_seen += 1
        self.begin_step(self.step + 1)

    def look_closely(self) -> None:
        """Look at the next steps as at the first ones: the state was restored."""
        self._close_until = self.steps_seen + FIRST_STEPS
        self.begin_step(self.step)

    @property
    def is_evaluating(self) -> bool:
        """Whether the loop says that it validates, or the model generates."""
        loop = self._loop
        return loop is not None and (loop.context.evaluating or loop.context.generating)

    @property
    def has_updates(self) -> bool:
        """Whether update hooks change gradients."""
        return self._loop is not None and self._loop.hooks.dispatchers.update is not None

    def known(self, name: str) -> Any:
        """Return an argument of events, such as `batch`; None if this loop does not provide it."""
        return None if self._loop is None else self._loop.context.known(name)

    @property
    def is_compiled(self) -> bool:
        """Whether a part of the model is compiled: its modules' calls cannot be seen."""
        return any(
            is_compiled_in_place(module) or type(module).__name__ == "OptimizedModule"
            for module in self.model.modules()
        )

    @property
    def module_names(self) -> dict[nn.Module, str]:
        """The names of the model's modules, without those of wrappers."""
        places = {place.full_name: place.name for place in module_places(self.model)}
        return {m: places.get(name, name) for name, m in self.model.named_modules()}

    # -- parameters --------------------------------------------------------------------------------

    @property
    def parameters(self) -> list[ParameterPlace]:
        """The model's parameters in this step; a tied one once, under its first name."""
        if self._ids_of == self.steps_seen:  # collecting them takes a while
            return self._places
        self._ids_of = self.steps_seen
        ids = tuple(map(id, self.model.parameters()))
        if ids != self._ids:
            names = named_parameters(self.model, None)
            found: dict[int, ParameterPlace] = {}
            for module in self.model.modules():
                for attribute, tensor in module.named_parameters(recurse=False):
                    if id(tensor) in names and id(tensor) not in found:
                        place = ParameterPlace(names[id(tensor)], tensor, module, attribute)
                        found[id(tensor)] = place
            self._ids, self._places = ids, list(found.values())
        return self._places

    def name_of(self, tensor: Any) -> str | None:
        """Return the name of a parameter; None if the model does not have it."""
        return next((each.name for each in self.parameters if each.tensor is tensor), None)

    def optimized(self) -> dict[int, list[Any]]:
        """Return the optimizers that have a parameter, by the parameter's `id`."""
        found: dict[int, list[Any]] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found.setdefault(id(parameter), []).append(optimizer)
        return found

    # -- tensors -----------------------------------------------------------------------------------

    def sample(self, tensor: Tensor) -> Tensor:
        """Return a copy of some elements of a tensor, always the same ones, on its device.

        It is empty for a tensor without memory.
        """
        values = stored_values(tensor)
        if values.untyped_storage().size() == 0:  # FSDP2 has freed it
            return values.new_empty(0)
        stride = max(1, values.numel() // _SAMPLE)
        return values.reshape(-1)[: _SAMPLE * stride : stride].clone()

    def read(self, tensors: Sequence[Tensor], judge: Judge, *args: Any) -> None:
        """Read tensors at the end of the step; then call `judge(numbers, *args)`.

        `numbers` is a list with a number for each scalar tensor, and a list for each vector.
        """
        self._reads.append((list(tensors), judge, args))

    def compare_ranks(self, key: str, value: Any, judge: Judge) -> None:
        """Exchange a value with the other ranks; when all have it, call `judge(values)`, by rank.

        A key that a rank does not have in the same step is dropped. The value is a number, a text,
        or a list or dict of these: a judge of `read` may call this. Only in due steps.
        """
        self._exchanges[key] = (value, judge)

    def settle(self, guard: Callable[[Judge, tuple[Any, ...]], None]) -> None:
        """Read all tensors with one transfer, exchange values with other ranks, and judge."""
        reads, self._reads = self._reads, []
        if reads:
            numbers = iter(read_tensors(tensor for tensors, _, _ in reads for tensor in tensors))
            for tensors, judge, args in reads:
                values = [next(numbers) for _ in tensors]
                guard(judge, (values, *args))
        if self.ranks > 1 and self.is_due:
            exchanges, self._exchanges = self._exchanges, {}
            self._exchange.publish(self.steps_seen, self.step, exchanges)
        if self.ranks > 1:
            self._judge_ranks(guard)

    def _judge_ranks(self, guard: Callable[[Judge, tuple[Any, ...]], None]) -> None:
        now = self.step
        for step, judge, values in self._exchange.receive():
            self.step = step
            guard(judge, (values,))
        self.step = now

    def finish(self, guard: Callable[[Judge, tuple[Any, ...]], None]) -> None:
        """Judge what other ranks have published until the end."""
        self._exchange.wait()
        self._judge_ranks(guard)
