"""Heartbeat: a sign of life for those who watch over many runs."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat

from hookline.checkpoint.atomic_files import TEMPORARY
from hookline.errors import ConfigError
from hookline.hook import Rank
from hookline.hooks.notification.http import MASK, Secret, Sender, checked_url
from hookline.options import BuiltIn

__all__ = ["Heartbeat"]

log = logging.getLogger("hookline")

TIMEOUT = 10.0
WAIT_AT_END = 2.0


class Heartbeat(BuiltIn):
    """Touches a file or an address every few seconds, as long as batches are being done.

    It is the training itself that touches it, at the end of a batch: when a run hangs, or has died,
    it stops. So whoever finds `time` older than a few times `every_seconds` and a batch should
    look. The file is JSON, replaced as a whole: `time` (seconds since 1970), `step`, `epoch`,
    `status`, `pid` and `host`; when training ends, `status` says how. An address is fetched by GET,
    in the background, and not any more when training has ended.

    Args:
        path: the file; None: `heartbeat.json` in the run's folder, unless there is a `url`.
        url: the address; it is not shown anywhere, as it may hold a secret.
        every_seconds: how long to wait before touching it again.
    """

    cost = "Reads a clock in every batch, and replaces a small file every `every_seconds`."
    hookline_rank = Rank.WRITER
    hookline_optional_events = frozenset({"on_validation_batch_end"})

    def __init__(
        self,
        path: str | Path | None = None,
        url: Secret | None = None,
        every_seconds: PositiveFloat = 30.0,
    ) -> None:
        if url is not None:
            self.hookline_options = {**self.hookline_options, "url": MASK}
        self._given = None if path is None else Path(path)
        self._url = None if url is None else checked_url(url, "Heartbeat: url")
        self._every = every_seconds
        self._due = 0.0
        self._path: Path | None = None
        self._sender: Sender | None = None
        self._failed = False

    def on_train_start(self, trainer: Any) -> None:
        """Give the first sign."""
        self._path, self._failed = None, False
        self._touch(trainer)

    def on_train_batch_end(self, trainer: Any) -> None:
        """Give a sign, when it is due."""
        if time.monotonic() >= self._due:
            self._touch(trainer)

    def on_validation_batch_end(self, trainer: Any) -> None:
        """Give a sign, when it is due: a long validation is no hung run."""
        if time.monotonic() >= self._due:
            self._touch(trainer)

    def on_train_end(self, trainer: Any) -> None:
        """Write how training ended."""
        self._write(trainer)
        if self._sender is not None:
            self._sender.close(WAIT_AT_END)
            self._sender = None

    def _in_run(self, trainer: Any) -> Path | None:
        if self._url is not None:
            return None
        run = getattr(trainer, "run", None)
        if run is None:
            raise ConfigError(
                "Heartbeat has nowhere to write: this training has no run folder. Give path=… or "
                "url=…"
            )
        return Path(run.path) / "heartbeat.json"

    def _touch(self, trainer: Any) -> None:
        self._due = math.inf  # if there is no place to write, once is enough to say so
        if self._path is None:  # the first sign, also of a hook that came in later
            self._path = self._given or self._in_run(trainer)
        self._due = time.monotonic() + self._every
        self._write(trainer)
        if self._url is not None:
            if self._sender is None:
                # Only the latest sign matters, and the next one comes soon enough.
                self._sender = Sender("heartbeat", timeout=TIMEOUT, retries=0, most=1)
            self._sender.send(self._url)

    def _write(self, trainer: Any) -> None:
        if self._path is None:
            return
        epoch = getattr(trainer, "epoch", None)  # a bare loop's session cannot tell
        sign = {
            "time": time.time(),
            "step": trainer.step,
            "epoch": epoch if isinstance(epoch, int) else None,
            "status": trainer.status,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        # Not synced: after a power cut an old sign is as good as none, and syncing may take long.
        temporary = self._path.with_name(f"{TEMPORARY}{self._path.name}-{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(sign) + "\n", encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            if not self._failed:
                log.warning("Cannot write %s: %s. Training goes on.", self._path, error)
            self._failed = True
        else:
            self._failed = False
