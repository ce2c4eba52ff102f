"""Requests to skip the step of an optimizer in a bare loop."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hookline.loop.control_requests import ControlRequests

__all__ = ["StepSkips"]


class StepSkips:
    """Requests to skip steps: an optimizer's gradients are removed, so its step changes nothing.

    Attributes:
        is_active: whether something has to be done before a step. An attribute, because it is read
            three times in each step.
    """

    def __init__(self, requests: ControlRequests) -> None:
        self.is_active = False
        self._any_rank: Callable[[bool], bool] | None = None
        self._reasons = requests.skips  # by optimizer; -1 for all

    def share(self, any_rank: Callable[[bool], bool]) -> None:
        """Skip in all processes together; `any_rank` returns whether any of them has set a flag."""
        self._any_rank, self.is_active = any_rank, True

    def activate(self) -> None:
        """Look at the requests before the next step: there is one."""
        self.is_active = True

    def reason(self, i: int) -> str | None:
        """Return why an optimizer's step is skipped; None if it is not."""
        return self._reasons.get(i, self._reasons.get(-1))

    def apply(self, i: int, optimizer: torch.optim.Optimizer) -> None:
        """Remove the gradients of a step that is to be skipped, in all processes together."""
        skips = self.reason(i) is not None
        if self._any_rank is not None and self._any_rank(skips) and not skips:
            self._reasons[i] = "another process asked"
            skips = True
        if skips:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = None

    def forget(self, i: int) -> None:
        """Forget requests for gradients that no step has used."""
        self._reasons.pop(i, None)
        self._reasons.pop(-1, None)
        self.is_active = bool(self._reasons) or self._any_rank is not None

    def clear(self) -> None:
        """Forget all requests."""
        self._reasons.clear()
        self.is_active = self._any_rank is not None
