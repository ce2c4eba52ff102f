"""LossSpikeDetector: notices spikes of the loss, and keeps what is known about them."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from hookline.context import LazyFloat
from hookline.hooks.monitoring.monitor_bases import TrainingMonitor
from hookline.runs.jsonable import to_jsonable
from hookline.runs.jsonl_reader import read_jsonl_backwards

log = logging.getLogger("hookline")
_TO_DEVIATION = 1.4826  # the median distance of a normal distribution, to its deviation
_DELAY = 1  # steps after which a loss is read, so that the device is not waited for
_MAX_VALUES = 5000  # in one event
_MAX_SPIKES = 100  # in one run


class LossSpikeDetector(TrainingMonitor):
    """Notices spikes of the training loss, and records what was logged around them.

    The loss of a step is compared with those of the `window` steps before it, by a robust z-score:
    its distance from their median, divided by 1.4826 times their median distance from it, or by a
    thousandth of the median where that is more. A loss that is not finite is a spike, too, from the
    first step on. Steps that follow within `steps_after` belong to the same spike, and so do those
    after it until the loss is finite.

    A warning is logged at once. When `steps_after` more steps are over, or training ends, the
    event `loss_spike` is written to the run's `events.jsonl`:

    | field | meaning |
    |---|---|
    | `step`, `epoch`, `loss`, `z` | where it began, the loss there and its z-score |
    | `median`, `deviation` | of the window before it |
    | `peak`, `peak_step` | the largest loss of the spike, and its step |
    | `batches` | of the first step: `loader`, `batch_idx`, and `indices` in the dataset |
    | `values` | by name: pairs of step and value, the last 5,000 logged in the steps around it |

    Up to 100 spikes of a run are recorded, each once, also after resuming. `indices` is null where
    the loop does not know them: Hookline's trainer and bare loops do, for a `DataLoader` with a
    map-style dataset. The same records are in `spikes`, also without a run. With several ranks, the
    first one's loss and batches are watched.

    Args:
        threshold: the z-score above which a loss is a spike.
        window: how many losses to compare with.
        min_steps: how many of them there have to be.
        steps_before: from how many steps before a spike logged values are kept.
        steps_after: for how many steps after its begin.
    """

    cost = "About 10 µs per step; at a spike, the end of the metrics log is read once."
    hookline_optional_events = frozenset({"on_train_batch_start"})
    ranks = "main"

    def __init__(
        self,
        threshold: PositiveFloat = 6.0,
        window: Annotated[int, Field(ge=4, le=1_000_000)] = 100,
        *,
        min_steps: Annotated[int, Field(ge=4)] = 20,
        steps_before: PositiveInt = 100,
        steps_after: PositiveInt = 20,
    ) -> None:
        self.threshold = threshold
        self.window = window
        self.min_steps = min(min_steps, window)
        self.steps_before = steps_before
        self.steps_after = steps_after
        self.spikes: list[dict[str, Any]] = []
        self._losses: deque[float] = deque(maxlen=window)
        self._unread: deque[tuple[int, int | None, LazyFloat | float, list[Any]]] = deque()
        self._batches: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def on_train_batch_start(
        self, trainer: Any, batch_idx: int, dataloader_name: str, dataloader_idx: int
    ) -> None:
        find = getattr(trainer, "sample_indices", None)
        indices = None if find is None else find(dataloader_idx, batch_idx)
        self._batches.append(
            {"loader": dataloader_name, "batch_idx": batch_idx, "indices": indices}
        )

    def on_step_end(self, step: int, loss: LazyFloat, state: Any, run: Any) -> None:
        epoch = state.get("current_epoch") if isinstance(state, Mapping) else None
        self._unread.append((step, epoch, loss, self._batches))
        self._batches = []
        self._check_until(step - _DELAY, run)

    def on_train_end(self, step: int, run: Any) -> None:
        self._check_until(step, run)
        self._write(run)

    def state_dict(self) -> dict[str, Any]:
        unread = [[step, epoch, float(loss), b] for step, epoch, loss, b in self._unread]
        return {
            "losses": list(self._losses),
            "unread": unread,
            "open": self._open,
            "spikes": list(self.spikes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self.window)
        self._unread = deque((step, epoch, loss, b) for step, epoch, loss, b in state["unread"])
        self._open = state["open"]
        self.spikes = list(state["spikes"])

    def _check_until(self, last_step: int, run: Any) -> None:
        while self._unread and self._unread[0][0] <= last_step:
            step, epoch, lazy, batches = self._unread.popleft()
            loss = float(lazy)
            is_over = self._open is not None and step > self._open["step"] + self.steps_after
            if is_over and math.isfinite(loss):
                self._write(run)
            self._check(step, epoch, loss, batches)

    def _check(self, step: int, epoch: int | None, loss: float, batches: list[Any]) -> None:
        center, deviation = self._describe_window()
        z = _robust_z(loss, center, deviation)
        window = len(self._losses)
        known = window >= self.min_steps
        if math.isfinite(loss):
            self._losses.append(loss)
        if self._open is not None:
            if not math.isnan(self._open["peak"]) and not loss <= self._open["peak"]:
                self._open |= {"peak": loss, "peak_step": step}
        elif not math.isfinite(loss) or (known and z > self.threshold):
            if len(self.spikes) >= _MAX_SPIKES:
                return
            log.warning(
                "Step %s: the loss spikes to %.4g, from a median of %.4g in the last %s steps "
                "(robust z-score %.3g).",
                *(step, loss, center, window, z),
            )
            self._open = {"step": step, "epoch": epoch, "loss": loss, "z": z}
            self._open |= {"median": center, "deviation": deviation}
            self._open |= {"peak": loss, "peak_step": step, "batches": batches}

    def _describe_window(self) -> tuple[float, float]:
        """Return the median of the losses in the window, and their deviation from it."""
        if not self._losses:
            return math.nan, math.nan
        center = median(self._losses)
        return center, _TO_DEVIATION * median(abs(loss - center) for loss in self._losses)

    def _write(self, run: Any) -> None:
        """Record the spike in progress, with what was logged around it."""
        spike, self._open = self._open, None
        if spike is None:
            return
        self.spikes.append(spike)
        if run is None or not hasattr(run, "event") or _is_recorded(run, spike):
            return
        first, last = spike["step"] - self.steps_before, spike["step"] + self.steps_after
        run.event("loss_spike", **spike, values=_read_values(run, first, last))


def _is_recorded(run: Any, spike: Mapping[str, Any]) -> bool:
    """Return whether the run has the event: training may have been resumed from before it."""
    known = {name: to_jsonable(spike[name]) for name in ("step", "loss")}
    return any(
        record.get("kind") == "loss_spike" and known.items() <= record.items()
        for record in read_jsonl_backwards(run.path / "events.jsonl")
    )


def _robust_z(loss: float, center: float, deviation: float) -> float:
    if not math.isfinite(loss):
        return math.inf
    # A constant loss has no deviation: one of a thousandth is assumed, or of a millionth for zero.
    return (loss - center) / (max(deviation, 1e-3 * abs(center)) or 1e-6)


def _read_values(run: Any, first: int, last: int) -> dict[str, list[Any]]:
    """Return the scalars that were logged in these steps, by name."""
    run.flush()
    found: dict[str, list[Any]] = {}
    kept = 0
    for record in read_jsonl_backwards(run.metrics_file):
        step, value = record.get("step"), record.get("value")
        if not isinstance(step, int) or step > last or record.get("kind") != "scalar":
            continue
        if step < first or kept == _MAX_VALUES:
            break
        found.setdefault(str(record.get("name")), []).append([step, value])
        kept += 1
    return {name: found[name][::-1] for name in sorted(found)}
