"""Heartbeat: shows monitoring tools that training is alive."""

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

from hookline.arguments import user_path
from hookline.checkpoint.atomic_files import write_atomic
from hookline.errors import ConfigError
from hookline.hook import HookGroup
from hookline.hooks.notification.http import Secret, Sender, checked_url
from hookline.options import BuiltIn

log = logging.getLogger("hookline")

TIMEOUT = 10.0
WAIT_AT_END = 2.0


class Heartbeat(BuiltIn):
    """Writes a file or requests a URL every few seconds, as long as training advances.

    The heartbeat comes from the training loop itself, at the end of a step or of a batch of
    validation, so it stops if a run hangs or dies. A run needs attention if `time` is older than a
    few times `every_seconds` plus the duration of a step. The file is JSON and replaced atomically:
    `time` (seconds since 1970), `step`, `epoch`, `status`, `pid` and `host`. When training ends,
    `status` shows how. A URL is requested with GET, in the background, and only until training
    ends.

    Args:
        path: the file; None: `heartbeat.json` in the run's folder, unless there is a `url`.
        url: the URL; it is not shown anywhere, because it may contain a secret.
        every_seconds: the time between heartbeats.
    """

    cost = "Reads a clock in every step, and replaces a small file every `every_seconds`."
    secret_options = frozenset({"url"})
    hookline_group = HookGroup.WRITER
    ranks = "main"
    hookline_optional_events = frozenset({"on_validation_batch_end"})

    def __init__(
        self,
        path: str | Path | None = None,
        url: Secret | None = None,
        every_seconds: PositiveFloat = 30.0,
    ) -> None:
        self._requested_path = None if path is None else user_path(path)
        self._url = None if url is None else checked_url(url, "Heartbeat: url")
        self._every = every_seconds
        self._due = 0.0
        self._path: Path | None = None
        self._sender: Sender | None = None
        self._failed = False

    def on_train_start(self, trainer: Any) -> None:
        self._path = None
        self._failed = False
        self._beat(trainer)

    def on_step_end(self, trainer: Any) -> None:
        if time.monotonic() >= self._due:
            self._beat(trainer)

    on_validation_batch_end = on_step_end

    def on_train_end(self, trainer: Any) -> None:
        self._write(trainer)
        if self._sender is not None:
            self._sender.close(WAIT_AT_END)
            self._sender = None

    def _beat(self, trainer: Any) -> None:
        self._due = math.inf  # if there is no file to write, raise only once
        if self._path is None:  # the first heartbeat, possibly of a hook that was added later
            self._path = self._requested_path
            if self._path is None and self._url is None:
                run = getattr(trainer, "run", None)
                if run is None:
                    raise ConfigError(
                        "Heartbeat has no file to write, because this training run has no run "
                        "folder. Pass path=… or url=…"
                    )
                self._path = Path(run.path) / "heartbeat.json"
        self._due = time.monotonic() + self._every
        self._write(trainer)
        if self._url is not None:
            if self._sender is None:
                # Only the latest heartbeat matters, and the next one follows soon.
                self._sender = Sender("heartbeat", timeout=TIMEOUT, retries=0, max_pending=1)
            self._sender.send(self._url)

    def _write(self, trainer: Any) -> None:
        if self._path is None:
            return
        epoch = getattr(trainer, "epoch", None)  # a bare loop may not provide it
        heartbeat = {
            "time": time.time(),
            "step": trainer.step,
            "epoch": epoch if isinstance(epoch, int) else None,
            "status": trainer.status,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        # Not synced: after a power failure an old heartbeat is of no use, and syncing may be slow.
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(heartbeat) + "\n", durable=False)
        except OSError as error:
            if not self._failed:
                log.warning("Cannot write %s: %s. Training continues.", self._path, error)
            self._failed = True
        else:
            self._failed = False
