"""ConsoleLogHook: prints progress to the console."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from pydantic import PositiveInt

from hookline.hook import Rank
from hookline.hooks.metric_lookup import metrics_text, number_text
from hookline.options import BuiltIn

__all__ = ["ConsoleLogHook"]

MAX_LOSSES = 100  # each may hold a number on the device


class ConsoleLogHook(BuiltIn):
    """Prints progress every few batches, and at the end of epochs, validations and training.

    A line has the epoch, the batch and the steps, each counted from 1, the batch's loss, and the
    average over the batches since the last line (100 at most). Lines are written with `print`, and
    appear above a progress bar.

    Args:
        log_every_n_batches: print every N batches of a loader, starting with the first.
    """

    cost = "Keeps each loss; when it prints, it reads those since the last line and waits for them."
    hookline_rank = Rank.WRITER
    hookline_optional_events = frozenset({"on_epoch_end", "on_validation_end"})

    def __init__(self, log_every_n_batches: PositiveInt = 10) -> None:
        self._every = log_every_n_batches
        self._losses: deque[Any] = deque(maxlen=min(self._every, MAX_LOSSES))

    def on_train_batch_end(
        self, epoch: int, batch_idx: int, dataloader_name: str, step: int, loss: Any
    ) -> None:
        """Print a line every N batches."""
        self._losses.append(loss)
        if batch_idx % self._every:
            return
        average = sum(map(float, self._losses)) / len(self._losses)
        self._losses.clear()
        loader = "" if dataloader_name == "train" else f"{dataloader_name} "
        print(
            f"epoch {epoch + 1}  {loader}batch {batch_idx + 1}  step {step}  "
            f"loss {number_text(loss)}  average {number_text(average)}",
            flush=True,
        )

    def on_validation_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the validation metrics."""
        print(f"validation at step {step}: {metrics_text(metrics)}", flush=True)

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Print the epoch's metrics."""
        self._losses.clear()
        print(f"epoch {epoch + 1} ends: {metrics_text(metrics)}", flush=True)

    def on_train_end(self, status: str, step: int) -> None:
        """Print how training ended."""
        self._losses.clear()
        print(f"training ends at step {step}: {status}", flush=True)
