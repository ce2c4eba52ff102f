"""Rule 2, the life of gradients: they start from zero, and reach the step as they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.training_view import TrainingView

_STEPS_IN_A_ROW = 2


class GradientsNotZeroed(Check):
    """The gradient of a step contains that of the step before.

    `backward` adds to `.grad`. Where nobody zeroes it, each step uses the sum of all gradients so
    far, which acts like a growing learning rate.

    Bug:
        for x, y in loader:
            loss_fn(model(x), y).backward()
            optimizer.step()

    Fix:
        Call `optimizer.zero_grad()` once in each step, before `backward`.

    Ignore:
        When old gradients are kept on purpose, as a momentum of your own.
    """

    id = "gradients-not-zeroed"
    rule = 2

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._used: dict[int, tuple[Tensor, Tensor]] = {}  # by optimizer: parameter and gradient
        self._remainders: dict[int, list[Tensor]] = {}  # by optimizer, at each backward since then
        self._in_a_row: dict[int, int] = {}

    def on_after_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Note the gradient that was used."""
        self._used.pop(id(optimizer), None)
        self._remainders[id(optimizer)] = []
        if view.is_due:
            parameter = _first_with_gradient(optimizer)
            if parameter is not None and parameter.grad is not None:
                self._used[id(optimizer)] = (parameter, parameter.grad)

    def on_before_backward(self, view: TrainingView, loss: Any) -> None:
        """Measure what is left of used gradients."""
        for key, (parameter, gradient) in self._used.items():
            if parameter.grad is gradient:
                self._remainders[key].append(view.sample(gradient).abs().sum())

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Judge whether the gradient of the step is new."""
        used = self._used.get(id(optimizer))
        remainders = self._remainders.get(id(optimizer))
        if used is None or not remainders or used[0].grad is not used[1]:
            self._in_a_row[id(optimizer)] = 0
            return
        view.read(remainders, self._judge, view, optimizer, view.name_of(used[0]))

    def _judge(
        self, numbers: list[float], view: TrainingView, optimizer: Any, name: str | None
    ) -> None:
        count = self._in_a_row.get(id(optimizer), 0) + 1 if all(numbers) else 0
        self._in_a_row[id(optimizer)] = count
        if count >= _STEPS_IN_A_ROW:
            self.find(
                view,
                f"{type(optimizer).__name__}",
                f"Before backward, the gradient of '{name}' still had that of the step before "
                f"(sum of magnitudes {numbers[0]:.3g}), in {count} steps in a row.",
                "Call optimizer.zero_grad() in each step, before backward.",
            )


def _first_with_gradient(optimizer: Any) -> Tensor | None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next((p for p in parameters if p.grad is not None), None)


GRADIENT_CHECKS = (GradientsNotZeroed,)
