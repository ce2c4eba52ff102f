"""Rule 2, the life of gradients: they start from zero, and reach the step as they are."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import lr_scheduler

from hookline.hooks.lint.finding import Check, in_due_steps
from hookline.hooks.lint.loss_graph import LossGraph
from hookline.hooks.lint.torch_watch import ModuleCall
from hookline.hooks.lint.training_view import TrainingView
from hookline.loop.clip_watch import ClipCall
from hookline.tensors.sharded import needs_collective

_STEPS_IN_A_ROW = 2
_MAX_PARAMETERS = 4  # of an optimizer, where a few tell enough
_MAX_NODES = 2000  # of a graph
_MARK = "hookline_step"


class GradientsNotZeroed(Check):
    """The gradient of a step contains that of the step before.

    `backward` adds to `.grad`. Where nobody zeroes it, each step uses the sum of all gradients so
    far, which acts like a growing learning rate.

    Bug:
        for x, y in loader:
            loss_fn(model(x), y).backward()
            optimizer.step()
    Fix: Call `optimizer.zero_grad()` in each step, before backward.
    Ignore: When old gradients are kept on purpose, as a momentum of your own.
    """

    def setup(self) -> None:
        self._used: dict[int, tuple[Tensor, Tensor]] = {}  # by optimizer: parameter and gradient
        self._remainders: dict[int, list[Tensor]] = {}  # by optimizer, at each backward since then

    @in_due_steps
    def on_after_optimizer_step(self, optimizer: Any) -> None:
        self._used.pop(id(optimizer), None)
        self._remainders[id(optimizer)] = []
        parameter = _small_matrix(optimizer)
        if parameter is not None:
            self._used[id(optimizer)] = (parameter, parameter.grad)  # type: ignore[assignment]

    @in_due_steps
    def on_before_backward(self, loss: Any) -> None:
        for key, (parameter, gradient) in self._used.items():
            if parameter.grad is gradient:
                self._remainders[key].append(self.sample(gradient).abs().sum())

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        used = self._used.get(id(optimizer))
        remainders = self._remainders.get(id(optimizer))
        if used is None or not remainders or used[0].grad is not used[1]:
            self.in_a_row(False, id(optimizer))
            return
        self.read(remainders, self._judge, optimizer, self.view.name_of(used[0]))

    def _judge(self, numbers: list[float], optimizer: Any, name: str | None) -> None:
        count = self.in_a_row(all(numbers), id(optimizer))
        if count >= _STEPS_IN_A_ROW:
            self.find(
                f"{type(optimizer).__name__}",
                f"Before backward, the gradient of '{name}' still had that of the step before "
                f"(sum of magnitudes {numbers[0]:.3g}), in {count} steps in a row.",
            )


class GradientsZeroedBeforeStep(Check):
    """Gradients are zeroed between backward and the step, which then does nothing.

    Bug:
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
    Fix: Call `zero_grad` before backward, or after the step.
    Ignore: When most steps are left out in this way on purpose. Loops with update hooks are not
        looked at: one of these may make gradients zero.
    """

    def setup(self) -> None:
        self._sums: dict[int, list[tuple[Tensor, Tensor]]] = {}  # parameters, sums of gradients

    @in_due_steps
    def on_after_backward(self) -> None:
        for optimizer in () if self.view.has_updates else self.view.optimizers:
            chosen = _some_with_gradients(optimizer)
            if chosen:
                self._sums[id(optimizer)] = [(p, _sum(self.view, p.grad)) for p in chosen]

    @in_due_steps
    def on_before_clip(self, call: ClipCall) -> None:
        """Compare before clipping, which makes gradients zero if their norm is not finite."""
        for optimizer in _optimizers_of(self.view, call):
            self._compare(optimizer)

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._compare(optimizer)

    def _compare(self, optimizer: Any) -> None:
        rows = self._sums.pop(id(optimizer), [])
        now = [_sum(self.view, p.grad) for p, _ in rows if p.grad is not None]
        if rows:
            self.read([*(each for _, each in rows), *now], self._judge, optimizer, len(rows))

    def _judge(self, numbers: list[float], optimizer: Any, count: int) -> None:
        # A gradient that is not finite is zeroed on purpose.
        had_gradients = any(0 < number < math.inf for number in numbers[:count])
        is_zeroed = had_gradients and not any(numbers[count:])
        steps = self.in_a_row(is_zeroed, id(optimizer))
        if steps >= _STEPS_IN_A_ROW:
            self.find(
                type(optimizer).__name__,
                f"After backward, {count} gradients that were looked at had magnitudes of up to "
                f"{max(numbers[:count]):.3g}; when the optimizer stepped all were zero or None, in "
                f"{steps} steps in a row.",
            )


class ClipWithoutEffect(Check):
    """Gradients are clipped when there are none, or after the step has used them.

    Bug:
        loss.backward()
        optimizer.step()
        clip_grad_norm_(model.parameters(), 1.0)
    Fix: Clip between the last backward and the step.
    Ignore: When you call a clipping function for the norm that it returns. With `max_norm=inf` this
        is no finding.
    """

    def setup(self) -> None:
        self._stepped: set[int] = set()  # optimizers, without a backward since then
        self._clips: dict[int, list[str]] = {}  # by optimizer: why each was in vain, or ""

    @in_due_steps
    def on_before_backward(self, loss: Any) -> None:
        self._stepped.clear()

    @in_due_steps
    def on_clip_call(self, call: ClipCall) -> None:
        has_gradients = any(tensor.grad is not None for tensor in call.tensors)
        for key in map(id, _optimizers_of(self.view, call) if _limits(call) else ()):
            why = "after the step" if key in self._stepped else ""
            if not has_gradients:
                why = "before backward, when there were no gradients"
            self._clips.setdefault(key, []).append(why)

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clips = self._clips.pop(id(optimizer), [])
        count = self.in_a_row(clips and all(clips), id(optimizer))
        if count >= _STEPS_IN_A_ROW:
            self.find(
                type(optimizer).__name__,
                f"The gradients were clipped {clips[-1]}, in {count} steps in a row, and not "
                "between backward and step.",
            )

    @in_due_steps
    def on_after_optimizer_step(self, optimizer: Any) -> None:
        self._stepped.add(id(optimizer))


class ClippedWhileScaled(Check):
    """Gradients are clipped while a `GradScaler` has them multiplied by its scale.

    A norm of 1 is then asked of gradients that are 65,536 times too large: after unscaling, almost
    nothing is left of them.

    Bug:
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
    Fix: Call `scaler.unscale_(optimizer)` before clipping.
    Ignore: When you have multiplied the limit by the scale.
    """

    def setup(self) -> None:
        self._scaler: Any = None
        self._clipped: set[int] = set()  # optimizers

    def on_loss_scaled(self, scaler: Any) -> None:
        self._scaler = scaler

    @in_due_steps
    def on_clip_call(self, call: ClipCall) -> None:
        if self._scaler is None or not _limits(call):
            return
        for optimizer in _optimizers_of(self.view, call):
            if _stage(self._scaler, optimizer) is OptState.READY:
                self._clipped.add(id(optimizer))
            else:
                self._clipped.discard(id(optimizer))

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if id(optimizer) not in self._clipped:
            return
        self._clipped.discard(id(optimizer))
        scale = getattr(self._scaler, "_scale", None)
        is_fused = getattr(optimizer, "grad_scale", None) is not None
        is_unscaled = is_fused or _stage(self._scaler, optimizer) is OptState.UNSCALED
        if is_unscaled and isinstance(scale, Tensor):
            self.read([scale], self._judge, type(optimizer).__name__)

    def _judge(self, numbers: list[float], name: str) -> None:
        scale = numbers[0]
        if scale != 1:
            self.find(
                name,
                f"Gradients were clipped while they were multiplied by {scale:g}, and unscaled "
                f"afterwards: a limit of 1 acts like {1 / scale:.3g}.",
            )


def _stage(scaler: Any, optimizer: Any) -> Any:
    states = getattr(scaler, "_per_optimizer_states", {})
    state = states.get(id(optimizer))
    return OptState.READY if state is None else state["stage"]


class ClipDiffersOverRanks(Check):
    """Ranks that train one model have scaled its gradients by different factors.

    Each rank has clipped by the norm of its own shard or of its own gradients, so the update is no
    multiple of the gradient any more, and replicas drift apart.

    Bug:
        clip_grad_norm_([p.grad.to_local() for p in model.parameters()], 1.0)
    Fix: Give the parameters themselves (DTensors) to `clip_grad_norm_`, after gradients are synced.
    Ignore: Never.
    """

    needs_ranks = True

    def setup(self) -> None:
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._name = ""

    @in_due_steps
    def on_after_backward(self) -> None:
        for optimizer in self.view.optimizers:
            parameter = _small_matrix(optimizer)
            if parameter is not None and _is_shared(self.view, parameter):
                self._before[id(optimizer)] = parameter, _sum(self.view, parameter.grad)

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameter, before = self._before.pop(id(optimizer), (None, None))
        if parameter is None or before is None or parameter.grad is None:
            return
        self._name = self.view.name_of(parameter) or type(optimizer).__name__
        key = f"{self.id} {self.view.optimizers.index(optimizer)}"
        self.read([before, _sum(self.view, parameter.grad)], self._exchange, key)

    def _exchange(self, numbers: list[float], key: str) -> None:
        before, after = numbers
        self.view.compare_ranks(key, after / before if before else None, self._judge)

    def _judge(self, factors: list[Any]) -> None:
        if not all(isinstance(each, float) for each in factors):
            return
        differ = max(factors) - min(factors) > 0.01 * max(factors)
        if self.in_a_row(differ) >= _STEPS_IN_A_ROW:
            shown = ", ".join(f"{factor:.4g}" for factor in factors)
            self.find(
                self._name,
                f"The gradient was scaled (as by clipping to a norm) by {shown} on the ranks, in "
                f"{_STEPS_IN_A_ROW} steps in a row.",
                "Clip by the norm of the whole model: give the parameters to clip_grad_norm_, "
                "which sums over shards, or sum the squares over ranks yourself.",
            )


def _is_shared(view: TrainingView, parameter: Tensor) -> bool:
    """Return whether ranks have parts of a parameter, or replicas that DDP keeps equal."""
    ddp = torch.nn.parallel.DistributedDataParallel
    return needs_collective(parameter) or any(isinstance(m, ddp) for m in view.model.modules())


class SchedulerStepsTooOften(Check):
    """A learning rate scheduler is stepped several times per optimizer step.

    The schedule ends so many times too early: it is stepped once per micro-batch, while it was made
    for optimizer steps. If its length is a multiple of the loader's, it is taken to count batches.

    Bug:
        for i, batch in enumerate(loader):  # the optimizer is stepped in each fourth
            scheduler.step()
    Fix: Step the scheduler where the optimizer is stepped.
    Ignore: When the schedule counts micro-batches.
    """

    severity = "warning"

    def setup(self) -> None:
        self._stepped: dict[Any, int] = {}  # by scheduler: steps since the optimizer's latest one
        self._before: dict[Any, int] = {}  # the same, between the two optimizer steps before
        self._batches = 0

    def on_loader_start(self, loader: Any, iterator: Any) -> None:
        with suppress(TypeError):  # an IterableDataset has no length
            self._batches = self._batches or len(loader)

    @in_due_steps
    def on_scheduler_step(self, scheduler: Any) -> None:
        """Count; the constructor makes a first step."""
        is_absolute = isinstance(scheduler, lr_scheduler.CosineAnnealingWarmRestarts)
        if getattr(scheduler, "_step_count", 0) > 1 and not is_absolute:
            self._stepped[scheduler] = self._stepped.get(scheduler, 0) + 1

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        stepped, self._stepped = self._stepped, {}
        if len(self.view.optimizers) != 1 or self.view.steps_seen < 3:
            return
        before, self._before = self._before, stepped
        for scheduler in {*before, *stepped}:
            count = stepped.get(scheduler, 0)
            is_often = count > 1 and count == before.get(scheduler)
            times = self.in_a_row(is_often, id(scheduler)) + 1
            if times >= 2 * _STEPS_IN_A_ROW and not self._is_meant(scheduler, count):
                name = type(scheduler).__name__
                self.find(
                    name,
                    f"{name} was stepped {count} times between two optimizer steps, {times} times "
                    f"in a row, so its schedule passes {count} times as fast.",
                )

    def _is_meant(self, scheduler: Any, count: int) -> bool:
        """Return whether the schedule counts batches, or Accelerate steps it once per process."""
        is_per_process = "accelerate" in sys.modules and count == self.view.ranks
        length = _length_of(scheduler)
        return is_per_process or bool(length and self._batches and length % self._batches == 0)


def _length_of(scheduler: Any) -> int:
    """Return the number of steps of a schedule; 0 if it is not known."""
    for name in ("total_steps", "T_max", "total_iters"):
        length = getattr(scheduler, name, None)
        if isinstance(length, int):
            return length
    for function in getattr(scheduler, "lr_lambdas", ()):
        length = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(length, int):
            return length
    return 0


class Fp16WithoutScaler(Check):
    """A model computes in float16, and the loss is not scaled.

    The smallest number of float16 is 6e-8: smaller gradients of activations become zero.

    Bug:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        loss.backward()
    Fix: Use `torch.amp.GradScaler`, or bfloat16, which needs none.
    Ignore: When you scale the loss yourself, in another way than with a factor.
    """

    severity = "warning"

    def setup(self) -> None:
        self._module: str | None = None  # that has returned float16 in this step
        self._is_scaled = any(name in sys.modules for name in ("deepspeed", "apex"))

    def on_module_call(self, call: ModuleCall) -> None:
        output = call.output
        if self._module is None and isinstance(output, Tensor) and output.dtype is torch.float16:
            own = call.module.parameters(recurse=False)
            if output.requires_grad and any(parameter.requires_grad for parameter in own):
                self._module = call.name

    def on_loss_scaled(self, scaler: Any) -> None:
        self._is_scaled = True

    @in_due_steps
    def on_before_backward(self, loss: Any) -> None:
        node = getattr(loss, "grad_fn", None)
        if node is None or node.name().startswith("Mul"):
            self._is_scaled = True

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        name, self._module = self._module, None
        count = self.in_a_row(name is not None and not self._is_scaled)
        if name is not None and count >= _STEPS_IN_A_ROW:
            self.find(
                name,
                f"'{name}' returns float16, and no GradScaler has scaled the loss in "
                f"{count} steps: gradients below 6e-8 become zero.",
            )


class GraphRetained(Check):
    """The graph of a step contains those of the steps before.

    Backward goes through all of them, so each step takes longer and needs more memory than the one
    before, and gradients are those of old weights.

    Bug:
        total = total + loss  # of all steps
        total.backward(retain_graph=True)
    Fix: Detach what is carried from step to step: `total += loss.detach()`, `hidden.detach()`.
    Ignore: Never.
    """

    @in_due_steps
    def on_before_backward(self, loss: Any) -> None:
        step = self.view.steps_seen
        if step > 5 or not isinstance(loss, Tensor) or loss.grad_fn is None:
            return
        old: set[int] = set()
        count = 0
        for node in LossGraph(loss, _MAX_NODES).nodes:
            marks = getattr(node, "metadata", None)
            if marks is None or not node.next_functions:
                continue  # parameters are part of every graph
            if marks.setdefault(_MARK, step) != step:
                old.add(marks[_MARK])
                count += 1
        if len(old) >= _STEPS_IN_A_ROW:
            self.find(
                "loss", f"Backward goes through {count} operations of {len(old)} earlier steps."
            )


# -- gradients of optimizers -----------------------------------------------------------------------


def _dense(optimizer: Any) -> Iterator[Tensor]:
    """Yield the optimizer's parameters with a gradient that is not sparse."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                yield parameter


def _small_matrix(optimizer: Any) -> Tensor | None:
    """Return the smallest matrix with a gradient, or vector: large ones are often embeddings."""
    return min(_dense(optimizer), key=lambda p: (p.ndim < 2, p.numel()), default=None)


def _some_with_gradients(optimizer: Any) -> list[Tensor]:
    parameters = list(_dense(optimizer))
    return parameters[:: -(-len(parameters) // _MAX_PARAMETERS) or 1]


def _sum(view: TrainingView, gradient: Tensor | None) -> Tensor:
    """Return the sum of magnitudes of some elements."""
    return view.sample(gradient).abs().sum() if gradient is not None else torch.zeros(())


def _limits(call: ClipCall) -> bool:
    """Return whether a call clips; some loops ask for the norm only."""
    return not isinstance(call.max_norm, float | int) or call.max_norm < 1e8


def _optimizers_of(view: TrainingView, call: ClipCall) -> list[Any]:
    """Return the optimizers of parameters that are clipped."""
    clipped = set(map(id, call.tensors))
    return [
        optimizer
        for optimizer in view.optimizers
        if any(id(p) in clipped for group in optimizer.param_groups for p in group["params"])
    ]
