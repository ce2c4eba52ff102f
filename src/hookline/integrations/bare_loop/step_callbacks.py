"""What a `StepWatch` calls in the session that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hookline.context import LazyFloat

__all__ = ["StepCallbacks"]


@dataclass(frozen=True)
class StepCallbacks:
    """What a step watch calls when it sees something."""

    begin: Callable[[], None]  # something of training was seen; called often
    before_forward: Callable[[], None]
    after_forward: Callable[[Any], None]  # with what the model has returned
    end_batch: Callable[[], None]  # the batch in progress has ended with a step
    record_step: Callable[[LazyFloat | None], None] | None  # with its loss; None without a run
    record_skip: Callable[[int, str], None]  # with the optimizer's number and the reason
    unmet_requirements: Callable[[], list[str]]  # returns a line for each
    requirements_met: Callable[[], None]  # the first step begins, and hooks get all they need
