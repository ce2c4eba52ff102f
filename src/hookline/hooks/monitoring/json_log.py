"""JSONLogHook: writes a log of JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from hookline.arguments import user_path
from hookline.context import LazyFloat
from hookline.hook import HookGroup
from hookline.masking import mask_secrets
from hookline.options import BuiltIn
from hookline.runs.jsonable import to_jsonable
from hookline.runs.jsonl_file import JsonlFile, encode_line
from hookline.runs.manifest import utc_now


class JSONLogHook(BuiltIn):
    """Writes a JSON line for batches, epochs, validations, checkpoints and the end of training.

    Each line has `timestamp` (UTC), `event` (the name without `on_`), `epoch` and `step`. Lines of
    batches also have `batch`, `loader` and `loss`; those of epochs and validations have `metrics`.
    In a bare loop that does not load batches through its session, lines of steps, with `loss`, take
    the place of those of batches. Epochs and batches are counted from 0. A killed process leaves no
    partial line. Values that JSON does not support are written as their `repr`, NaN as the string
    "NaN". After resuming, the steps behind the checkpoint are written again; the run's own
    `metrics.jsonl` has each value once.

    Args:
        every: write every N batches of a loader, starting with the first.
        path: the file; None: `log.jsonl` in the run's folder, or in the current folder if there is
            no run. Lines are appended to an existing file.
    """

    every_name = "log_every_n_batches"
    cost = "Reads and waits for the loss of the batches that it writes; one system call per line."
    hookline_group = HookGroup.WRITER
    ranks = "main"
    hookline_optional_events = frozenset(
        {"on_train_batch_end", "on_epoch_end", "on_validation_end", "on_checkpoint_save"}
    )

    def __init__(self, every: PositiveInt = 100, path: str | Path | None = None) -> None:
        self.every = every
        self._requested_path = None if path is None else user_path(path)
        self._file: JsonlFile | None = None
        self._failed = self._has_batches = False

    def on_train_start(self, trainer: Any, epoch: int, step: int) -> None:
        self._has_batches = False
        self._write(trainer, "train_start", epoch=epoch, step=step)

    def on_train_batch_end(
        self,
        trainer: Any,
        batch_idx: int,
        dataloader_name: str,
        step: int,
        loss: LazyFloat,
        epoch: int | None = None,
    ) -> None:
        self._has_batches = True
        if not batch_idx % self.every:
            position = {"epoch": epoch, "batch": batch_idx, "loader": dataloader_name, "step": step}
            self._write(trainer, "train_batch_end", **position, loss=loss)

    def on_step_end(
        self, trainer: Any, step: int, loss: LazyFloat, epoch: int | None = None
    ) -> None:
        if not self._has_batches and not (step - 1) % self.every:
            self._write(trainer, "step_end", epoch=epoch, step=step, loss=loss)

    def on_validation_end(
        self, trainer: Any, step: int, metrics: Mapping[str, Any], epoch: int | None = None
    ) -> None:
        self._write(trainer, "validation_end", epoch=epoch, step=step, metrics=metrics)

    def on_epoch_end(self, trainer: Any, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        self._write(trainer, "epoch_end", epoch=epoch, step=step, metrics=metrics)

    def on_checkpoint_save(
        self, trainer: Any, step: int, checkpoint_path: Any, epoch: int | None = None
    ) -> None:
        self._write(trainer, "checkpoint_save", epoch=epoch, step=step, path=checkpoint_path)

    def on_exception(
        self, trainer: Any, step: int, exception: BaseException, epoch: int | None = None
    ) -> None:
        error = f"{type(exception).__name__}: {exception}"
        self._write(trainer, "exception", epoch=epoch, step=step, error=error)

    def on_train_end(self, trainer: Any, step: int, status: str, epoch: int | None = None) -> None:
        self._write(trainer, "train_end", epoch=epoch, step=step, status=status)
        if self._file is not None:
            self._file.close()
        self._file, self._failed = None, False

    def _write(self, trainer: Any, event: str, **fields: Any) -> None:
        if self._failed:
            return  # the failure to open was logged
        if self._file is None:  # the first event, possibly of a hook that was added later
            self._failed = True
            run = getattr(trainer, "run", None)
            path = self._requested_path or (run.path if run else Path()) / "log.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = JsonlFile(path, follow_links=self._requested_path is not None)
            self._failed = False
        record = {"timestamp": utc_now(), "event": event}
        record.update((name, mask_secrets(to_jsonable(value))) for name, value in fields.items())
        self._file.append([encode_line(record)])
