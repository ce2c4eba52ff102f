"""GradientNoiseScale: estimates the batch size beyond which larger batches pay off less."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import harmonic_mean
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hookline.errors import HookConfigError
from hookline.hooks.monitoring.monitor_bases import TrainingMonitor, parameters_of
from hookline.loop.evaluation import samples_in
from hookline.loop.loop import processes_of
from hookline.tensors.device_numbers import read_tensors
from hookline.tensors.norms import global_norm
from hookline.tensors.sharded import is_sharded, stored_values

log = logging.getLogger("hookline")


class GradientNoiseScale(TrainingMonitor):
    """Estimates the simple noise scale of the gradient, tr(Σ) / |G|², in samples.

    Below that batch size, twice the batch saves nearly half of the steps; far above it, it saves
    nearly none (arXiv 1812.06162). The estimate compares the gradients of micro-batches with the
    gradient that they accumulate to, over all ranks:

        |G|² = (B |g_B|² - b |g_b|²) / (B - b)        tr(Σ) = (|g_b|² - |g_B|²) / (1/b - 1/B)

    with b samples in a micro-batch (the harmonic mean, if they differ) and B in a step, and |g_b|²
    as the mean over the micro-batches of all ranks. Both are averaged over reports, separately,
    before they are divided.

    | value | meaning |
    |---|---|
    | `gradient_noise/scale` | the ratio of the two averages; omitted while the first is negative |
    | `gradient_noise/signal` | the average of the estimates of the squared norm of the gradient |
    | `gradient_noise/variance` | the average of the estimates of tr(Σ), for one sample |
    | `gradient_noise/batch_size` | the samples in this step, to compare with |

    It needs several micro-batches in a step (gradient accumulation) or several processes (DDP). A
    step whose micro-batches are not seen one by one is left out; a warning says why, once.
    Parameters that are sharded (FSDP2) are refused.

    Args:
        every: measure every N optimizer steps.
        decay: how much of an average stays when a new estimate comes.
        batch_size: the samples in a micro-batch; None: the size of the first dimension of the
            batch, where the loop provides its batches.
    """

    every_name = "log_frequency"
    cost = (
        "Only for a report: a norm of each parameter's gradient in each backward, and one wait for "
        "the device; with several processes one small collective."
    )
    hookline_optional_events = frozenset({"on_train_batch_start"})

    def __init__(
        self,
        every: PositiveInt = 10,
        decay: Annotated[float, Field(ge=0, lt=1)] = 0.95,
        batch_size: PositiveInt | None = None,
    ) -> None:
        self.every = every
        self.decay = decay
        self.batch_size = batch_size
        self._signal, self._variance, self._weight = 0.0, 0.0, 0.0
        self._sizes: list[int] = []
        self._warned = False  # that it measures nothing
        self._told = False  # why a step was left out
        self._boundary: int | None = None  # the step that begins where a step has ended
        self._handles: list[RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        self._stop_watching()
        self._step: int | None = None
        self._parameters: list[Tensor] = []
        self._in_backward = False
        self._squares: list[dict[int, Tensor]] = []  # of each micro-batch, by parameter
        self._problem = ""  # why the step cannot be used
        self._scaled: Tensor | None = None  # the norm of all gradients after the last backward
        self._norm: Tensor | None = None  # the same when they are ready, so unscaled

    def on_train_start(self, optimizers: list[Any], trainer: Any, step: int) -> None:
        self._forget()
        self._sizes, self._boundary = [], step
        self._check(optimizers, trainer)

    def _check(self, optimizers: list[Any], trainer: Any) -> None:
        if any(is_sharded(parameter) for parameter in parameters_of(optimizers)):
            raise HookConfigError(
                "GradientNoiseScale: the model's parameters are sharded (FSDP2), so that the "
                "gradient of a micro-batch exists nowhere. Remove the hook, or train with DDP."
            )
        every = getattr(getattr(trainer, "config", None), "optimizer_every", None)
        if isinstance(every, list | tuple) and any(n != 1 for n in every):
            raise HookConfigError(
                "GradientNoiseScale: optimizers that step at different steps accumulate gradients "
                "of several steps. Remove the hook, or leave optimizer_every out."
            )

    def on_train_batch_start(self, batch: Any) -> None:
        if self.batch_size is None:
            self._sizes.append(samples_in(batch))

    def on_before_forward(self, step: int, optimizers: list[Any], trainer: Any) -> None:
        """Watch the gradients of the backward that follows, if the step is due."""
        if (step + 1) % self.every or self._warned:
            return
        if self._step != step:
            self._forget()  # a step whose end was not seen
            if self._boundary != step:
                return  # the hook was enabled within this step
            self._check(optimizers, trainer)  # also of a hook that was added during training
            self._step = step
            self._parameters = [p for p in parameters_of(optimizers) if p.requires_grad]
        if not self._in_backward:
            self._squares.append({})
            self._watch()
        self._in_backward = True

    def _watch(self) -> None:
        for number, parameter in enumerate(self._parameters):
            hook: Callable[[Tensor], None] = partial(self._add, number)
            self._handles.append(parameter.register_hook(hook))

    def _stop_watching(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _add(self, number: int, gradient: Tensor) -> None:
        squares = self._squares[-1]
        if number in squares:  # or the hook was disabled after a forward
            self._problem = "a parameter got its gradient in several parts"
            self._stop_watching()
        squares[number] = global_norm([stored_values(gradient).float()]).square()

    def on_after_backward(self) -> None:
        if self._in_backward:
            self._stop_watching()
            self._in_backward = False
            self._scaled = self._total_norm()
        elif self._step is not None:
            self._problem = "there were two backwards after one forward"

    def on_gradients_ready(self) -> None:
        if self._step is not None and self._norm is None:
            self._norm = self._total_norm()

    def on_step_end(self, trainer: Any, step: int) -> None:
        sizes, self._sizes = self._sizes, []
        self._boundary = step
        if self._step is None:
            return
        if self._step not in (step - 1, step):  # a skipped step does not count
            self._forget()
            return
        processes = processes_of(trainer)
        if len(self._squares) * processes.size == 1:
            self._forget()
            self._warned = True
            log.warning(
                "GradientNoiseScale needs several micro-batches in a step (gradient accumulation) "
                "or several processes. There is one of each, so it measures nothing."
            )
            return
        sizes = self._sizes_of_micro_batches(sizes)
        measured = self._measure_step()
        own = None if measured is None else (*read_tensors([measured])[0], sizes)
        if self._problem and not self._told:
            self._told = True
            log.warning("Step %s: no gradient noise scale, since %s.", step, self._problem)
        self._forget()
        ranks = processes.gather(own)
        if all(one is not None and math.isfinite(one[0] + one[1]) for one in ranks):
            self._update(ranks)
            self._log(trainer, sum(sum(one[2]) for one in ranks))

    def _measure_step(self) -> Tensor | None:
        """Return two squared norms of gradients, without waiting for the device.

        The first is the mean over the micro-batches of this rank, the second that of the step.
        None if they cannot be used.
        """
        squares, scaled, norm = self._squares, self._scaled, self._norm
        n = len(squares)
        if scaled is None or norm is None or self._problem or not all(squares):
            return None
        home = norm.device
        totals = torch.stack(
            [torch.stack([s.to(home) for s in one.values()]).sum() for one in squares]
        )
        # A micro-batch's part of an accumulated mean is one n-th of its own gradient.
        of_small = totals.mean() * n**2 * (norm / scaled).square()
        return torch.stack([of_small, norm.square()])

    def _sizes_of_micro_batches(self, sizes: list[int]) -> list[int]:
        n = len(self._squares)
        if self.batch_size is not None:
            return [self.batch_size] * n
        if not sizes:
            self._warned = True
            raise HookConfigError(
                "GradientNoiseScale: this loop does not provide its batches. Give the number of "
                "samples in a micro-batch: GradientNoiseScale(batch_size=…)."
            )
        if len(sizes) != n:
            self._problem = f"there were {len(sizes)} batches and {n} backwards"
        elif not all(sizes):
            self._problem = "a batch has no samples"
        return sizes

    def _update(self, ranks: list[tuple[float, float, list[int]]]) -> None:
        """Add an estimate from two squared norms and the sizes of micro-batches in each rank."""
        of_small, of_big = sum(one[0] for one in ranks) / len(ranks), ranks[0][1]
        sizes = [size for *_, several in ranks for size in several]
        small = harmonic_mean(sizes)
        big = small * len(sizes)
        signal = (big * of_big - small * of_small) / (big - small)
        variance = (of_small - of_big) / (1 / small - 1 / big)
        new = 1 - self.decay
        self._signal = self.decay * self._signal + new * signal
        self._variance = self.decay * self._variance + new * variance
        self._weight = self.decay * self._weight + new

    def _log(self, trainer: Any, batch_size: int) -> None:
        signal, variance = self._signal / self._weight, self._variance / self._weight
        if signal > 0:
            trainer.log("gradient_noise/scale", variance / signal)
        trainer.log("gradient_noise/signal", signal)
        trainer.log("gradient_noise/variance", variance)
        trainer.log("gradient_noise/batch_size", batch_size)

    def _total_norm(self) -> Tensor:
        gradients = [stored_values(p.grad).float() for p in self._parameters if p.grad is not None]
        return global_norm(gradients) if gradients else torch.zeros(())

    on_train_end = _forget

    def state_dict(self) -> dict[str, Any]:
        return {"signal": self._signal, "variance": self._variance, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._signal, self._variance = state["signal"], state["variance"]
        self._weight = state["weight"]
