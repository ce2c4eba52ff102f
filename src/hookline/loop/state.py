"""The state of a loop: a list of named items, saved, compared and restored in order.

Collecting, comparing, adapting to another number of ranks, restoring and undoing are written once,
over this list. A driver adds items to it. Items that draw or restore random numbers come last.
Nothing of a loop is changed before everything was compared with the checkpoint.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from hookline.arguments import check_name, show_value
from hookline.checkpoint.differences import describe_dtypes, describe_mismatches
from hookline.checkpoint.snapshot import Encoder, decode
from hookline.dispatch import HookManager
from hookline.errors import ArgumentError, CheckpointError
from hookline.loop.event_context import EventContext, parameters_of
from hookline.loop.means import add_means
from hookline.loop.processes import SingleProcessGroup
from hookline.loop.record import Record
from hookline.loop.state_differences import (
    compare_objects,
    compare_scaler,
    describe_class,
    describe_hook_names,
    describe_optimizer,
)
from hookline.printable import message_lines
from hookline.tensors.memory import expand_buffers
from hookline.tensors.sharded import is_sharded, shard_like

if TYPE_CHECKING:
    from hookline.checkpoint import Checkpoint

log = logging.getLogger("hookline")

Gradients = Sequence[Sequence[Any] | None]
"""For each optimizer the gradients of its parameters, or None if they do not wait."""


@dataclass(frozen=True)
class StateItem:
    """One item of a loop's state.

    Attributes:
        name: its key in `state.json`.
        save: returns its state.
        load: restores what `save` returned; None if it is only compared.
        adapt: makes the state of this rank from those of all ranks that saved, if there were more
            or fewer of them: gets their states, and the processes. None if all ranks have the same
            state.
        compare: returns why a saved state cannot be loaded, one line each.
    """

    name: str
    save: Callable[[], Any]
    load: Callable[[Any], Any] | None = None
    adapt: Callable[[Sequence[Any], SingleProcessGroup], Any] | None = None
    compare: Callable[[Any], list[str]] | None = None


@dataclass
class LateStates:
    """States of a loaded checkpoint that wait for their objects, which the loop finds later.

    They are saved again in checkpoints, until their objects have come.

    Attributes:
        expects_optimizers: whether the loop finds optimizers while it runs.
        expects_scaler: the same for a scaler.
        optimizers: the states of the optimizers that come next, in their order.
        classes: the names of their classes, as far as the checkpoint has them.
        scaler: the state of the scaler; None if none waits.
    """

    expects_optimizers: bool = False
    expects_scaler: bool = False
    optimizers: list[Any] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    scaler: Any = None

    def describe(self, here: int) -> list[str]:
        """Return the objects whose states wait, in a loop that has so many optimizers."""
        found = [f"optimizer {here + i}" for i in range(len(self.optimizers))]
        return [*found, *(["the scaler"] if self.scaler is not None else [])]


class LoopState:
    """All that a checkpoint has of a loop, apart from the weights.

    Attributes:
        model: the model, with the weights' own names: not one that wraps it.
        best_accuracy: the best `val/accuracy` so far.
        restored_position: where the metrics log stood in the checkpoint that was loaded.
        overrides: states to save instead of those that items have now.
        late: the states of optimizers and of a scaler that the loop does not have yet.
        add_items: returns the items of a driver; they are restored after all others, and one of the
            same name is replaced.
    """

    def __init__(
        self,
        context: EventContext,
        hooks: HookManager,
        record: Record,
        attributes: SavedAttributes,
    ) -> None:
        self.model: torch.nn.Module
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.scaler: Any = None
        self.best_accuracy = 0.0
        self.restored_position: Any = None
        self.overrides: dict[str, Any] = {}
        self.late = LateStates()
        self.add_items: Callable[[], Sequence[StateItem]] = tuple
        self.record = record
        self._saved_classes: Mapping[str, Sequence[str]] = {}  # in the checkpoint that is loaded
        self._context, self._hooks, self._attributes = context, hooks, attributes

    def _common_items(self) -> list[StateItem]:
        """Return the items of every loop; they are not kept, which would make a cycle."""
        context, hooks, attributes = self._context, self._hooks, self._attributes
        optimizers, schedulers, scaler = self.optimizers, self.schedulers, self.scaler
        run, late = self.record.run, self.late
        return [
            StateItem("classes", self._classes, self._load_classes),
            StateItem(
                "optimizers",
                lambda: [*(optimizer.state_dict() for optimizer in optimizers), *late.optimizers],
                self._load_optimizers,
                compare=self._compare_optimizers,
            ),
            StateItem(
                "schedulers",
                lambda: [scheduler.state_dict() for scheduler in schedulers],
                self._load_schedulers,
                compare=lambda saved: compare_objects(
                    "scheduler", schedulers, saved, self._saved_classes
                ),
            ),
            StateItem(
                "scaler",
                lambda: late.scaler if scaler is None else scaler.state_dict(),
                self._load_scaler,
                compare=partial(compare_scaler, scaler),
            ),
            StateItem("hooks", hooks.state_dict, hooks.load_state_dict),
            StateItem("attributes", attributes.state_dict, attributes.load_state_dict),
            StateItem("disabled", self._disabled, self._disable),
            StateItem("step", lambda: context.step, self._load_step),
            StateItem("means", lambda: context.means.state_dict(), self._load_means, adapt_means),
            StateItem(
                "best_accuracy", lambda: self.best_accuracy, partial(setattr, self, "best_accuracy")
            ),
            StateItem(
                "run",
                lambda: None if run is None else run.position(),
                partial(setattr, self, "restored_position"),
            ),
        ]

    @property
    def _items(self) -> list[StateItem]:
        added = self.add_items()
        names = {item.name for item in added}
        return [item for item in self._common_items() if item.name not in names] + list(added)

    def collect(self, only: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the state of this rank, or some items of it."""
        chosen = [item for item in self._items if only is None or item.name in only]
        return {item.name: item.save() for item in chosen} | self.overrides

    def collect_own(self) -> dict[str, Any]:
        """Return what each rank has of its own."""
        return {item.name: item.save() for item in self._items if item.adapt is not None}

    def copy(self, *names: str) -> Callable[[], dict[str, Any]]:
        """Return a function that returns these items as they are now.

        Nothing if they cannot be saved: that is an error when a checkpoint is saved.
        """
        encoder = Encoder("state")
        try:
            tree = encoder.encode({i.name: i.save() for i in self._items if i.name in names})
        except CheckpointError:
            return dict
        return partial(decode, tree, encoder.tensors)

    def adapt(self, state: dict[str, Any], processes: SingleProcessGroup) -> None:
        """Replace, in a saved state, what each rank has of its own by that of this rank."""
        own = [item for item in self._items if item.adapt is not None]
        alone = {item.name: state.get(item.name) for item in own}
        saved = state.pop("ranks", None) or [alone]
        if len(saved) == processes.size:
            state.update(saved[processes.rank])
            return
        for item in own:
            if item.adapt is not None:  # always so: for type checkers
                state[item.name] = item.adapt([one[item.name] for one in saved], processes)

    def compare(self, saved: Mapping[str, Any]) -> list[str]:
        """Return what of a saved state, of the right form, cannot be loaded."""
        self._load_classes(saved.get("classes", {}))
        lines: list[str] = []
        for item in self._items:
            if item.compare is not None and saved.get(item.name) is not None:
                lines += item.compare(saved[item.name])
        return lines

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the items that a saved state has, in order."""
        for item in self._items:
            if item.load is not None and item.name in state:
                item.load(state[item.name])

    def restore_checkpoint(
        self,
        checkpoint: Checkpoint,
        processes: SingleProcessGroup,
        *,
        what: str,
        advice: str,
    ) -> None:
        """Restore a checkpoint, after comparing all of it.

        Args:
            checkpoint: what was read, of the right form.
            processes: the ranks that load it.
            what: what it is loaded into, for messages.
            advice: what to do if it does not fit, for messages.

        Raises:
            CheckpointError: it does not fit, or could not be loaded; the loop is as it was.
        """
        from hookline.loop.saved_state import reported_damage  # pydantic takes long to import

        model, weights = self.model, checkpoint.model
        lazy = {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if is_lazy(value) and isinstance(weights.get(name), torch.Tensor)
        }
        own_weights = {**model.state_dict(), **{name: weights[name] for name in lazy}}
        with reported_damage(checkpoint):
            self.adapt(checkpoint.state, processes)
            lines = describe_mismatches(weights, own_weights)
            lines += describe_dtypes(weights, own_weights) + self.compare(checkpoint.state)
            if lines:  # hooks may come and go: their names alone are no reason
                lines += describe_hook_names(checkpoint.state["hooks"], self._hooks.state_dict())
                text = f"The checkpoint {checkpoint.path} does not fit {what}. Nothing was changed."
                raise CheckpointError(message_lines(f"{text} {advice}", *lines))
        for name, value in lazy.items():
            value.materialize(weights[name].shape)
        self.load(checkpoint)

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the state and the weights of a checkpoint that fits, or change nothing.

        Raises:
            CheckpointError: loading failed; the loop is as it was.
        """
        before, model = self.collect(), self.model
        is_plain = all(isinstance(value, torch.Tensor) for value in checkpoint.model.values())
        weights = None if is_plain else copy.deepcopy(model.state_dict())
        try:
            self.restore(checkpoint.state)
            load_weights(model, checkpoint.model)
        except Exception as error:
            with suppress(Exception):  # the first error matters more
                self._undo(before)
            if weights is not None:  # tensors that were compared do not fail
                with suppress(Exception):
                    load_weights(model, weights)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"The checkpoint {checkpoint.path} could not be loaded, and nothing was changed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _undo(self, before: Mapping[str, Any]) -> None:
        """Go back to the state before a restore that has failed."""
        self.restore(before)
        for name in self._disabled():
            if name not in before["disabled"]:
                self._hooks.enable_hook(name)

    # -- items ------------------------------------------------------------------------------------

    def _classes(self) -> dict[str, list[str]]:
        return {
            "optimizers": [*(type(one).__name__ for one in self.optimizers), *self.late.classes],
            "schedulers": [type(scheduler).__name__ for scheduler in self.schedulers],
        }

    def _load_classes(self, saved: Mapping[str, Sequence[str]]) -> None:
        self._saved_classes = saved

    def _compare_optimizers(self, saved: Sequence[Any]) -> list[str]:
        if self.late.expects_optimizers and len(saved) > len(self.optimizers):
            saved = saved[: len(self.optimizers)]  # the others are compared when they come
        return compare_objects("optimizer", self.optimizers, saved, self._saved_classes)

    def _load_optimizers(self, states: Sequence[Any]) -> None:
        late, here = self.late, len(self.optimizers)
        if late.expects_optimizers:
            late.optimizers = list(states[here:])
            late.classes = list(self._saved_classes.get("optimizers", ())[here:])
            states = states[:here]
        for optimizer, saved in zip(self.optimizers, states, strict=True):
            load_optimizer(optimizer, saved)

    def _load_schedulers(self, states: Sequence[Any]) -> None:
        for scheduler, saved in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(saved)

    def _load_scaler(self, saved: Any) -> None:
        if self.scaler is None:
            self.late.scaler = saved if self.late.expects_scaler else None
        elif saved is not None:
            self.scaler.load_state_dict(saved)

    def connect_optimizer(self, optimizer: Any) -> list[str]:
        """Add an optimizer, and restore the state that waits for it; return why it cannot be."""
        late, index = self.late, len(self.optimizers)
        self.optimizers.append(optimizer)
        if not late.optimizers:
            return []
        saved, name = late.optimizers.pop(0), f"optimizer {index}"
        lines = describe_class(name, optimizer, late.classes.pop(0) if late.classes else None)
        lines += describe_optimizer(name, optimizer, saved)
        if lines:
            return lines
        rates = [group.get("lr") for group in optimizer.param_groups]
        load_optimizer(optimizer, saved)
        if rates != [group.get("lr") for group in optimizer.param_groups]:
            log.warning(
                "The learning rate of optimizer %d, which was made after the checkpoint was "
                "loaded, is now that of the checkpoint, also in this step. If the loop sets it by "
                "itself, make the optimizer first: attach(model, optimizer, …).",
                index,
            )
        return []

    def connect_scaler(self, scaler: Any, *, has_scaled: bool) -> list[str]:
        """Use a scaler, and restore the state that waits for it; return why it cannot be."""
        self.scaler = scaler
        saved, self.late.scaler = self.late.scaler, None
        if saved is None:
            return []
        if has_scaled:
            return ["the scaler: gradients were scaled before it was found. Give it to attach"]
        lines = compare_scaler(scaler, saved)
        if not lines:
            scaler.load_state_dict(saved)
        return lines

    def _disabled(self) -> list[str]:
        statuses = self._hooks.statuses()
        return [name for name, status in statuses.items() if status == "disabled"]

    def _disable(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._hooks:
                self._hooks.disable_hook(name)

    def _load_step(self, step: int) -> None:
        self._context.step, self._context.step_in_progress = step, step + 1
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                # Else a scheduler that steps before the next optimizer step warns about the order.
                optimizer._opt_called = step > 0  # type: ignore[attr-defined]

    def _load_means(self, state: Any) -> None:
        self._context.means.load_state_dict(state)


def adapt_means(saved: Sequence[Any], processes: SingleProcessGroup) -> Any:
    """Return the sums of all ranks in rank 0, and nothing in the others."""
    return add_means(saved) if processes.is_main else {}


def adapt_tokens(saved: Sequence[int | None], processes: SingleProcessGroup) -> int | None:
    """Return the tokens of this rank, so that all ranks together have as many as before."""
    known = [tokens for tokens in saved if tokens is not None]
    return sum(known) // processes.size if len(known) == len(saved) else None


class SavedAttributes:
    """Attributes that hooks have set on the trainer or session, and that checkpoints keep.

    Args:
        owner: what has the attributes; it is not kept alive.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)
        self._names: tuple[str, ...] = ()
        self._waiting: dict[str, Any] = {}  # restored when they are registered

    def register(self, *names: str) -> None:
        """Save these attributes from now on, and restore them if they were saved before."""
        owner = self._owner()
        for name in names:
            check_name("register_for_checkpoint(name)", name)
            if not hasattr(owner, name):
                raise ArgumentError(
                    f"There is no attribute {show_value(name)} to save. Set it before it is "
                    "registered."
                )
            if name not in self._names:
                self._names += (name,)
            if name in self._waiting:
                self._restore(owner, name, self._waiting.pop(name))

    @staticmethod
    def _restore(owner: Any, name: str, saved: Any) -> None:
        value = getattr(owner, name)
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(saved)
        else:
            setattr(owner, name, saved)

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes, also those that were not registered again after resuming."""
        values = {name: getattr(self._owner(), name) for name in self._names}
        own = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in values.items()
        }
        return {**self._waiting, **own}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore attributes; those that are not registered yet wait for that."""
        self._waiting = dict(states)
        self.register(*self._names)


def load_weights(model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Load whole weights into a model; each process keeps its shard of a sharded parameter."""
    expand_buffers(model)
    own = model.state_dict()
    if any(map(is_sharded, own.values())):
        versions = getattr(weights, "_metadata", None)
        weights = OrderedDict((name, _shard(v, own.get(name))) for name, v in weights.items())
        if versions is not None:
            weights._metadata = versions  # type: ignore[attr-defined]
    model.load_state_dict(weights)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state with whole tensors into an optimizer, whose parameters may be sharded."""
    parameters = parameters_of(optimizer)
    if any(map(is_sharded, parameters)):
        states = {
            index: {name: _shard(value, parameters[index]) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        state = {**state, "state": states}
    optimizer.load_state_dict(dict(state))


def _shard(value: Any, like: Any) -> Any:
    """Return a tensor sharded as another of its shape is, and every other value as it is."""
    tensors = isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor)
    return shard_like(value, like) if tensors and value.shape == like.shape else value


# -- gradients that wait for an optimizer which steps less often than others ----------------------


def save_gradients(optimizers: Sequence[Any], waits: Sequence[bool]) -> list[list[Any] | None]:
    """Return the gradients of the optimizers for which they wait."""
    return [
        [parameter.grad for parameter in parameters_of(optimizer)] if is_waiting else None
        for optimizer, is_waiting in zip(optimizers, waits, strict=True)
    ]


def load_gradients(optimizers: Sequence[Any], saved: Gradients) -> None:
    """Restore gradients that wait; those of other optimizers are left alone."""
    for optimizer, gradients in zip(optimizers, saved, strict=True):
        if gradients is not None:
            for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
                parameter.grad = None
                if gradient is not None:
                    parameter.grad = shard_like(gradient.to(parameter.device), parameter)


def compare_gradients(optimizers: Sequence[Any], saved: Gradients) -> list[str]:
    """Return a line if gradients that wait for their optimizer are of other parameters."""
    if len(saved) == len(optimizers) and all(map(_have_shapes, saved, optimizers)):
        return []
    return ["the gradients of the step in progress are those of other parameters"]


def _have_shapes(gradients: Sequence[Any] | None, optimizer: Any) -> bool:
    if gradients is None:
        return True
    parameters = parameters_of(optimizer)
    return len(gradients) == len(parameters) and all(
        gradient is None or gradient.shape == parameter.shape
        for gradient, parameter in zip(gradients, parameters, strict=True)
    )
