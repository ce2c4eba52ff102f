"""JSONLogHook: a log of JSON lines, for programs to read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from hookline.hook import Rank
from hookline.options import BuiltIn
from hookline.runs.jsonable import plain
from hookline.runs.jsonl_file import JsonlFile, line
from hookline.runs.manifest import now

__all__ = ["JSONLogHook"]


class JSONLogHook(BuiltIn):
    """Writes training down as JSON lines: batches, epochs, validations, checkpoints and the end.

    Each line has `timestamp` (UTC), `event` (the name without `on_`), `epoch` and `step`; batches
    have `batch`, `loader` and `loss`, the ends of epochs and validations `metrics`. Epochs and
    batches count from 0, as hooks get them. A line is there as a whole or not at all, also after a
    kill. A value that JSON does not have is written as its `repr`, NaN as the string "NaN".

    Args:
        log_every_n_batches: write each N-th batch of a loader, beginning with the first.
        path: where to write; None: `log.jsonl` in the run's folder, or in the current folder when
            there is no run. What is there stays, and lines are appended.
    """

    cost = "Reads the loss, and waits for it, in the batches it writes; a line is one system call."
    hookline_rank = Rank.WRITER
    hookline_optional_events = frozenset(
        {"on_epoch_end", "on_validation_end", "on_checkpoint_save"}
    )

    def __init__(
        self, log_every_n_batches: PositiveInt = 100, path: str | Path | None = None
    ) -> None:
        self._every = log_every_n_batches
        self._given = None if path is None else Path(path)
        self._file: JsonlFile | None = None
        self._failed = False

    def on_train_start(self, trainer: Any, epoch: int, step: int) -> None:
        """Open the file, so that one that cannot be written is known at once."""
        self._write(trainer, "train_start", epoch=epoch, step=step)

    def on_train_batch_end(
        self,
        trainer: Any,
        epoch: int,
        batch_idx: int,
        dataloader_name: str,
        step: int,
        loss: Any,
    ) -> None:
        """Write the batch, when it is due."""
        if not batch_idx % self._every:
            where = {"epoch": epoch, "batch": batch_idx, "loader": dataloader_name, "step": step}
            self._write(trainer, "train_batch_end", **where, loss=loss)

    def on_validation_end(
        self, trainer: Any, step: int, metrics: Mapping[str, Any], epoch: int | None = None
    ) -> None:
        """Write what validation has found."""
        self._write(trainer, "validation_end", epoch=epoch, step=step, metrics=metrics)

    def on_epoch_end(self, trainer: Any, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the epoch's metrics."""
        self._write(trainer, "epoch_end", epoch=epoch, step=step, metrics=metrics)

    def on_checkpoint_save(
        self, trainer: Any, step: int, checkpoint_path: Any, epoch: int | None = None
    ) -> None:
        """Write where the checkpoint is."""
        self._write(trainer, "checkpoint_save", epoch=epoch, step=step, path=checkpoint_path)

    def on_exception(
        self, trainer: Any, step: int, exception: BaseException, epoch: int | None = None
    ) -> None:
        """Write what went wrong."""
        error = f"{type(exception).__name__}: {exception}"
        self._write(trainer, "exception", epoch=epoch, step=step, error=error)

    def on_train_end(self, trainer: Any, step: int, status: str, epoch: int | None = None) -> None:
        """Write how training ended, and close the file."""
        self._write(trainer, "train_end", epoch=epoch, step=step, status=status)
        if self._file is not None:
            self._file.close()
        self._file, self._failed = None, False

    def _write(self, trainer: Any, event: str, **fields: Any) -> None:
        if self._failed:
            return  # as the log says
        if self._file is None:  # the first event, also for a hook that came in later
            self._failed = True
            self._file = self._open(getattr(trainer, "run", None))
            self._failed = False
        record = {"timestamp": now(), "event": event}
        record.update((name, plain(value)) for name, value in fields.items())
        self._file.append([line(record)])

    def _open(self, run: Any) -> JsonlFile:
        path = self._given
        if path is None:
            path = Path("log.jsonl") if run is None else run.path / "log.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return JsonlFile(path)
