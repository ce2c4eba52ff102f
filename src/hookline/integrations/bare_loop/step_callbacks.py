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
    unmet_requirements: Callable[[], list[str]]  # returns a line for each
    record_skip: Callable[[str, int], None]  # with the reason, and the optimizer's number
    requirements_met: Callable[[], None]  # the first step begins, and hooks get all they need
