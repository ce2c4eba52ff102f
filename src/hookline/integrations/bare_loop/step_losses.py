"""The losses of batches and steps in a bare loop.

The loop may give them (`session.backward(loss)`). Otherwise the loss is the tensor that backward
was called on. Under gradient accumulation most loops call `(loss / n).backward()`, with the number
of backwards in a step, which is known when the step ends; a loss that was divided by this number is
multiplied by it. The division is the last operation of the loss's graph, with its constant saved
there. Autograd frees it as soon as it has passed that operation: it is read before backward.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any

import torch

from hookline.context import NO_LOSS, LazyFloat
from hookline.integrations.bare_loop.loop_checks import Requirements
from hookline.loop.event_context import EventContext, Versions
from hookline.loop.model_watch import ModelGroup

log = logging.getLogger("hookline")

_HAS_DIVISOR = ("Div", "Mul", "ToCopy", "Compiled")  # operations that may divide, or hide it
_NONE, _SINGLE = Counter[int](), Counter({0: 1})  # losses by `steps_before`; of one backward

_OF_SEVERAL = (
    ". Each of the named optimizers has a loss of its own, which a run records as "
    "`train/loss/<name>`. A hook that works without it gives the parameter a default: `loss=None`. "
    "With lists instead of names, `attach([model, …], [optimizer, …])`, it is the mean of all."
)


class Backward:
    """One backward of the loop.

    Attributes:
        loss: what it was called on, unscaled; None if that is not a single number.
        versions: the gradients before it, by optimizer.
        scaler: what has multiplied the loss; None without a scaler.
        given: whether the loop gave its own loss (`session.backward`).
        divisor: the constant that the loss was divided by last; None without one.
        compiled: whether it comes out of a compiled function, which hides a division.
        known_divisor: the number that it was divided by, where another library says so.
        steps_before: how many times optimizers have stepped before it, in its step.
        is_plain: whether nothing of this matters, as in most loops.
    """

    given = compiled = is_plain = False  # of the class: setting few attributes is faster
    divisor: float | None = None
    known_divisor: float | None = None
    steps_before = 0

    def __init__(
        self,
        loss: torch.Tensor | None,
        versions: list[Versions],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.loss, self.versions, self.scaler = loss, versions, scaler


class StepLosses:
    """The losses of the step and of the batch in progress.

    Args:
        context: gets the losses.
        requirements: gets why there is no loss.
        divided: whether the loop divides its losses by the number of batches in a step; None to
            find out.

    Attributes:
        wanted: whether the losses of an unchanged loop are read.
        stepped: the optimizers that have stepped, while the step goes on with others.
        of_batch: the backwards of the batch in progress; None if there is none.
        named: the losses of the step that has ended, with their names, if each optimizer has its
            own; else nothing.
        plain_kind: the class of the last operation of losses that are not divided, as far as known.
        divisor: the number that each loss is divided by from now on, where another library says so.
    """

    def __init__(
        self,
        context: EventContext,
        requirements: Requirements,
        divided: bool | None = None,
        accumulated_batches: int = 0,
    ) -> None:
        self.wanted = False
        self.stepped: list[int] = []
        self.named: list[tuple[str, torch.Tensor]] = []
        self.of_batch: list[Backward] | None = None
        self._is_separate = bool(context.optimizer_names) and isinstance(context.model, ModelGroup)
        self.divisor: float | None = None
        self._context, self._requirements = context, requirements
        self._divided = divided
        self._step: list[Backward] = []
        self._first: list[Backward] = []
        self._group = accumulated_batches  # the number that a whole step has divided by
        self._is_known = False  # whether a step with several backwards has ended
        self.plain_kind: type | None = None
        self._counts = _NONE  # backwards of the step that ends, by how many optimizers had stepped

    @property
    def _has_no_mean(self) -> bool:
        """Whether there is no loss of the step: named optimizers have one each."""
        return self._is_separate and len(self._context.optimizer_names) > 1

    def look_at(self, backward: Backward) -> None:
        """Find out by what the loss of a backward that begins was divided and multiplied."""
        loss, scaler = backward.loss, backward.scaler
        if scaler is not None and not scaler.is_enabled():
            backward.scaler = scaler = None
        if loss is None or self._divided is False or self.divisor is not None:
            return
        is_scaled = scaler is not None
        kind = type(loss.grad_fn)
        # The class of a node has its name, which `node.name()` makes anew in each call.
        if not is_scaled and not kind.__name__.startswith(_HAS_DIVISOR):
            self.plain_kind = kind
        else:
            backward.divisor = find_divisor(loss, is_scaled=is_scaled)
            backward.compiled = backward.divisor is None and is_compiled(loss, is_scaled=is_scaled)

    def add(self, seen: Backward) -> None:
        """Add the loss of a backward that has ended."""
        if seen.loss is not None:
            seen.loss = seen.loss.detach()
            if seen.scaler is not None and not seen.given:
                seen.loss = _unscaled(seen.loss, seen.scaler)
        # Gradients were dropped since the last backward, if there was one: it had no step.
        if self._step and not self.stepped and not any(seen.versions):
            self._step.clear()
        if self.divisor is not None or self.stepped:
            seen.known_divisor, seen.steps_before = self.divisor, len(self.stepped)
        elif seen.loss is not None and seen.divisor is None and not seen.compiled:
            seen.is_plain = True
        self._step.append(seen)
        if self.of_batch is not None:
            self.of_batch.append(seen)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divide the step's losses by the scale of a scaler that was not known at backward."""
        for seen in self._step:
            if seen.loss is not None and seen.scaler is None and not seen.given:
                seen.loss, seen.scaler = _unscaled(seen.loss, scaler), scaler

    def take_latest(self) -> list[Backward]:
        """Take out the losses since the latest optimizer step: they are of the next one."""
        later = [seen for seen in self._step if seen.steps_before == len(self.stepped)]
        self._step = [seen for seen in self._step if seen.steps_before != len(self.stepped)]
        return later

    def put_back(self, losses: list[Backward]) -> None:
        """Let losses be the first ones of a step."""
        for seen in losses:
            seen.steps_before = 0
        self._step = losses

    def keep_first(self) -> None:
        """Keep the loss of a closure's first evaluation as that of the step."""
        self._first = list(self._step)

    def set_batch_loss(self) -> LazyFloat | None:
        """Set the context's loss to that of the batch that ends; return it."""
        self._set(self.of_batch or [], self._counts)
        loss: LazyFloat | None = self._context.known("loss")
        return loss

    def set_step_loss(self) -> None:
        """Set the context's loss to that of the step."""
        losses = self._first or self._step
        self._set(losses, _count_by_step(losses))

    def end_step(self) -> None:
        """Learn whether losses are divided, and add the step's loss to the means."""
        losses, context = self._first or self._step, self._context
        names, means = context.optimizer_names, context.means
        plain = losses[0].loss if len(losses) == 1 and losses[0].is_plain else None
        if plain is not None and not (self._divided or names):
            context.loss = context.latest_loss = LazyFloat(plain)
            means.add("train/loss", plain)
            self._counts, self._requirements.why_no_loss = _SINGLE, ""
            return
        self._counts = _count_by_step(losses)
        if len(losses) > 1 or self._divided:
            for count in self._counts:
                self._learn([seen for seen in losses if seen.steps_before == count])
        if names:
            self._is_separate |= len(self._counts) > 1
        own = self._set(losses, self._counts)
        if not own:
            return
        if not self._has_no_mean:
            context.latest_loss = context.loss
        if not self._is_separate:
            for loss in own:
                means.add("train/loss", loss)
            return
        # A mean over losses of different optimizers means nothing.
        names_of_steps = [f"train/loss/{names[i]}" for i in self.stepped or [0]]
        places = [seen.steps_before for seen in losses]
        self.named = [(names_of_steps[i], loss) for i, loss in zip(places, own, strict=True)]
        for name, loss in self.named:
            means.add(name, loss)

    def forget(self) -> None:
        """Forget the losses of the step."""
        self._step.clear()
        self._first = []
        self._counts = _NONE
        self.stepped.clear()
        self.named = []

    # -- losses that the loop has divided ---------------------------------------------------------

    def _learn(self, losses: list[Backward]) -> None:
        """Find out from the backwards of an optimizer step whether losses are divided; say so."""
        count = len(losses)
        if self._divided:
            self._group = max(self._group, count)
        if self._divided is not None or self.divisor is not None:
            return
        if count < 2 or any(seen.given for seen in losses):
            return
        is_divided = any(_is(seen.divisor, count) for seen in losses)
        if is_divided:
            self._group = max(self._group, count)
        if not self._is_known:
            what = f"divides the loss by {count}," if is_divided else "does not divide the loss by"
            log.info(
                "Backward runs %d times in a step, and the loop %s the number of backwards: `loss` "
                "is that of the batches. If this is wrong: attach(…, loss_divided=%s).",
                count,
                what,
                not is_divided,
            )
        self._is_known = True

    def _divisor(self, seen: Backward, count: int) -> float | None:
        """Return what this loss was divided by for accumulation; None if that is not known.

        Args:
            seen: the loss.
            count: the number of backwards of the optimizer step; 0 while it is in progress.
        """
        if seen.known_divisor is not None:
            return seen.known_divisor
        if seen.given or self._divided is False:
            return 1.0
        if self._divided:
            return seen.divisor or max(self._group, count) or None
        if seen.compiled:
            return 1.0 if count == 1 else None
        is_guess = count == 0 and not self._is_known and _is_whole(seen.divisor)
        if is_guess or _is(seen.divisor, count) or _is(seen.divisor, self._group):
            return seen.divisor
        return 1.0

    def _set(self, losses: list[Backward], counts: Counter[int]) -> list[torch.Tensor]:
        """Set the context's loss to the mean of these losses, undivided; return them."""
        context, absent = self._context, self._requirements
        first = losses[0].loss if len(losses) == 1 and not self._has_no_mean else None
        if first is not None and self._divisor(losses[0], counts[losses[0].steps_before]) == 1.0:
            context.loss, absent.why_no_loss = LazyFloat(first), ""  # as in most loops
            return [first]
        context.provide("loss", None)
        absent.why_no_loss = ""
        own: list[torch.Tensor] = []
        for seen in losses:
            divisor = self._divisor(seen, counts[seen.steps_before])
            if seen.loss is not None and divisor is not None:
                own.append(seen.loss if divisor == 1.0 else seen.loss * divisor)
            elif seen.loss is not None:
                absent.why_no_loss = (
                    ", because it comes out of a compiled function, and it cannot be seen whether "
                    "it was divided for gradient accumulation. Say so: "
                    "`attach(…, loss_divided=True)` or `False`."
                )
        if self._has_no_mean:
            absent.why_no_loss = _OF_SEVERAL
            return own if len(own) == len(losses) else []
        if not losses and self.wanted:
            context.loss = NO_LOSS  # nan for hooks; left out of means and of the record
            return []
        if len(own) < len(losses) or not losses:
            absent.why_no_loss = absent.why_no_loss or (
                f", because backward was not called on a single number. {absent.calls['backward']}"
            )
            return []
        if len(own) == 1:
            context.loss = LazyFloat(own[0])
        else:
            context.loss = LazyFloat(
                lambda: torch.stack([loss.float().reshape(()) for loss in own]).mean()
            )
        return own


def _count_by_step(losses: list[Backward]) -> Counter[int]:
    """Return how many losses there are before each optimizer step."""
    is_single = len(losses) == 1 and not losses[0].steps_before
    return _SINGLE if is_single else Counter(seen.steps_before for seen in losses)


def _unscaled(loss: torch.Tensor, scaler: torch.amp.GradScaler) -> torch.Tensor:
    """Return a loss divided by the scale, without waiting for the device."""
    return loss / scaler.scale(torch.ones_like(loss))


def _is(divisor: float | None, count: int) -> bool:
    """Return whether the divisor is this number, more than one."""
    return divisor is not None and count > 1 and math.isclose(divisor, count, rel_tol=1e-4)


def _is_whole(divisor: float | None) -> bool:
    return divisor is not None and _is(divisor, round(divisor))


def find_divisor(loss: torch.Tensor, *, is_scaled: bool = False) -> float | None:
    """Return the constant that the loss was divided by last; None without a division.

    Multiplying by a constant counts as dividing by its inverse. A constant on an accelerator is
    never read, because that would wait for the device.

    Args:
        loss: the tensor that backward is called on.
        is_scaled: whether a `GradScaler` has multiplied it by its scale after the loop's own
            operations.
    """
    node = _last_operation(loss, is_scaled)
    while _name(node) == "ToCopyBackward0":  # `.float()` of a divided loss
        node = _input(node)
    name = _name(node)
    if name == "DivBackward0":
        return _constant(node, "_saved_other", 1)
    if name == "MulBackward0":
        factor = _constant(node, "_saved_other", 1) or _constant(node, "_saved_self", 0)
        return None if not factor else 1.0 / factor
    return None


def is_compiled(loss: torch.Tensor, *, is_scaled: bool = False) -> bool:
    """Return whether the loss comes out of a compiled function, which hides its operations."""
    return "CompiledFunctionBackward" in _name(_last_operation(loss, is_scaled))


def _last_operation(loss: torch.Tensor, is_scaled: bool) -> Any:
    """Return the graph's last node, beneath the multiplication of a scaler."""
    node = loss.grad_fn
    return _input(node) if is_scaled and _name(node) == "MulBackward0" else node


def _name(node: Any) -> str:
    return "" if node is None else node.name()


def _input(node: Any) -> Any:
    """Return the node of the one input that has a gradient; None if there are several."""
    inputs = [function for function, _ in node.next_functions if function is not None]
    return inputs[0] if len(inputs) == 1 else None


def _constant(node: Any, saved: str, position: int) -> float | None:
    """Return a saved number, if the operand at this position is a constant on the CPU."""
    if node.next_functions[position][0] is not None:
        return None
    value = getattr(node, saved, None)
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.numel() != 1:
        return None
    return float(value)
