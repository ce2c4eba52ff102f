"""ConsoleLogHook: prints progress to the console."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from pydantic import PositiveInt

from hookline.context import LazyFloat
from hookline.hook import HookGroup
from hookline.hooks.metric_lookup import metrics_text, number_text
from hookline.options import BuiltIn
from hookline.printable import printable_message

MAX_LOSSES = 100  # each may hold a number on the device


class ConsoleLogHook(BuiltIn):
    """Prints progress every few batches, and at the end of epochs, validations and training.

    A line has the epoch, the batch and the steps, each counted from 1, the batch's loss, and the
    average over the batches since the last line (100 at most). Lines are written with `print`, and
    appear above a progress bar. In a bare loop that does not load batches through its session,
    there is a line every N steps, with the step's loss.

    Args:
        every: print every N batches of a loader, starting with the first.
    """

    every_name = "log_every_n_batches"
    cost = "Keeps each loss; when it prints, it reads those since the last line and waits for them."
    hookline_group = HookGroup.WRITER
    ranks = "main"
    hookline_optional_events = frozenset(
        {"on_train_batch_end", "on_epoch_end", "on_validation_end"}
    )

    def __init__(self, every: PositiveInt = 10) -> None:
        self.every = int(every)  # of numpy, too
        self._losses: deque[LazyFloat] = deque(maxlen=MAX_LOSSES)
        self._has_batches = False

    def on_train_start(self) -> None:
        self._losses.clear()
        self._has_batches = False

    def on_train_batch_end(
        self,
        batch_idx: int,
        dataloader_name: str,
        step: int,
        loss: LazyFloat,
        epoch: int | None = None,
    ) -> None:
        self._has_batches = True
        self._losses.append(loss)
        if batch_idx % self.every == 0:
            loader = "" if dataloader_name == "train" else f"{dataloader_name} "
            self._print(f"{loader}batch {batch_idx + 1}  step {step}", loss, epoch)

    def on_step_end(self, step: int, loss: LazyFloat, epoch: int | None = None) -> None:
        if not self._has_batches:
            self._losses.append(loss)
            if (step - 1) % self.every == 0:
                self._print(f"step {step}", loss, epoch)

    def _print(self, position: str, loss: LazyFloat, epoch: int | None) -> None:
        average = sum(map(float, self._losses)) / len(self._losses)
        self._losses.clear()
        numbers = f"loss {number_text(loss)}  average {number_text(average)}"
        start = "" if epoch is None else f"epoch {epoch + 1}  "
        _say(f"{start}{position}  {numbers}")

    def on_validation_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        _say(f"validation at step {step}: {metrics_text(metrics)}")

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        self._losses.clear()
        _say(f"epoch {epoch + 1} ends: {metrics_text(metrics)}")

    def on_train_end(self, status: str, step: int) -> None:
        self._losses.clear()
        _say(f"training ends at step {step}: {status}")


def _say(text: str) -> None:
    print(printable_message(text), flush=True)
