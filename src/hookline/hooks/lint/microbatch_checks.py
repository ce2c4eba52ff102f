"""Rule 3, micro-batches: together they give the gradient of the whole batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.hooks.lint.finding import Check, in_due_steps
from hookline.hooks.lint.label_checks import has_class_labels, is_label_used
from hookline.hooks.lint.torch_watch import LossCall

_MIN_RATIO = 1.25  # of the largest to the smallest number of labels
_MAX_SPREAD = 1e-3  # between weights that count as equal


class MeanOfMeans(Check):
    """Micro-batches with few labels count as much as those with many.

    Each loss is a mean over the labels of its micro-batch, and all means have the same weight, so
    the gradient is not that of the whole batch.

    Bug:
        for micro in step:
            loss = F.cross_entropy(model(micro.x), micro.y, ignore_index=-100)  # a mean
            (loss / len(step)).backward()
    Fix: Divide the sum of each micro-batch (`reduction="sum"`) by the number of labels of the step.
    Ignore: When each micro-batch is meant to count the same, as a task of its own.
    """

    severity = "warning"

    def setup(self) -> None:
        self._calls: list[LossCall] = []  # since the latest backward
        self._batches: list[tuple[bool, int, int]] = []  # whether means, classes, labels
        self._tensors: list[Tensor] = []
        self._is_clear = True
        self._varying_steps = 0

    @in_due_steps
    def on_loss_call(self, call: LossCall) -> None:
        is_trained = isinstance(call.result, Tensor) and call.result.requires_grad
        if is_trained and len(self._calls) < 2:
            self._calls.append(call)

    @in_due_steps
    def on_before_backward(self, loss: Any) -> None:
        calls, self._calls = self._calls, []
        if loss is None or loss.ndim or len(calls) != 1 or not has_class_labels(calls[0]):
            self._is_clear = False
            return
        call = calls[0]
        if call.input.ndim < 2 or call.result.ndim:
            self._is_clear = False
            return
        self._tensors += [call.result.detach(), loss.detach(), is_label_used(call).sum()]
        is_mean = call.options.get("reduction", "mean") == "mean"
        self._batches.append((is_mean, call.input.shape[1], call.target.numel()))

    @in_due_steps
    def on_step_end(self) -> None:
        batches, tensors, is_clear = self._batches, self._tensors, self._is_clear
        self._batches, self._tensors, self._is_clear, self._calls = [], [], True, []
        is_one_task = len({batch[:2] for batch in batches}) == 1
        if is_clear and is_one_task and len(batches) > 1:
            sizes = [size for _, _, size in batches]
            self.read(tensors, self._judge, sizes, batches[0][0])

    def _judge(self, numbers: list[float], sizes: list[int], is_mean: bool) -> None:
        results, losses, counts = numbers[::3], numbers[1::3], numbers[2::3]
        if not all(results) or not all(counts):
            return
        weights = [
            loss / result * (1.0 if is_mean else count)
            for loss, result, count in zip(losses, results, counts, strict=True)
        ]
        is_equal = max(weights) - min(weights) <= _MAX_SPREAD * abs(max(weights))
        is_varied = max(counts) > _MIN_RATIO * min(counts)
        if is_equal and is_varied and self._is_by_labels(counts, sizes):
            listed = ", ".join(f"{count:.0f}" for count in counts[:8])
            self.find(
                "cross_entropy",
                f"The {len(counts)} micro-batches of the step have {listed} labels, but their mean "
                f"losses have equal weights.",
            )

    def _is_by_labels(self, counts: list[float], sizes: list[int]) -> bool:
        """Return whether labels differ in number for another reason than a smaller last batch."""
        if any(count < size for count, size in zip(counts, sizes, strict=True)):
            return True
        first = counts[:-1]
        if max(first) <= _MIN_RATIO * min(first):
            return False
        self._varying_steps += 1
        return self._varying_steps > 1
