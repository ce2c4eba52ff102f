"""NotificationHook: messages about a training, to a chat."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from hookline.errors import ConfigError, listed
from hookline.hook import Rank
from hookline.hooks.notification.http import MASK, Secret, Sender, checked_url
from hookline.hooks.number_text import metrics_text, number_text
from hookline.options import BuiltIn

__all__ = ["NotificationHook"]

log = logging.getLogger("hookline")

Occasion = Literal[
    "training_start", "training_end", "best_model", "exception", "validation", "checkpoint"
]

VARIABLE = "HOOKLINE_WEBHOOK_URL"
LONGEST = 2000  # characters of a message; an exception's text may be endless


class NotificationHook(BuiltIn):
    """Posts messages about training to a webhook: Slack's, or one that takes the same JSON.

    Messages are sent from a thread of their own: a server that is slow or down does not slow
    training. The address is a secret: it is neither logged nor written into the run's record.

    Args:
        webhook_url: where to post; None: what the environment variable HOOKLINE_WEBHOOK_URL says.
        notify_on: what to tell of. After an exception's message there is none for the end.
        monitor: the metric that says which model is the best.
        mode: whether a smaller (`min`) or a larger value (`max`) is better.
        prefix: what each message begins with.
        timeout: seconds to wait for the server, at each try.
        retries: how often to try again when it fails.
        wait_at_end: seconds to wait, at most, for the last messages when training ends.
    """

    cost = (
        "Nothing per batch; reads metrics at the end of validations, and waits for `wait_at_end` "
        "seconds at most when training ends."
    )
    hookline_rank = Rank.WRITER

    def __init__(
        self,
        webhook_url: Secret | None = None,
        notify_on: list[Occasion] | tuple[Occasion, ...] = ("training_end", "exception"),
        monitor: str = "val/loss",
        mode: Literal["min", "max"] = "min",
        prefix: str = "",
        timeout: PositiveFloat = 10.0,
        retries: Annotated[int, Field(ge=0)] = 3,
        wait_at_end: Annotated[float, Field(ge=0)] = 5.0,
    ) -> None:
        if webhook_url is not None:  # not kept where describe() and the manifest find it
            self.hookline_options = {**self.hookline_options, "webhook_url": MASK}
        given = webhook_url if webhook_url is not None else os.environ.get(VARIABLE)
        if given is None:
            raise ConfigError(
                "NotificationHook has nowhere to post: give webhook_url, or set the environment "
                f"variable {VARIABLE}."
            )
        self._url = checked_url(given, "NotificationHook: webhook_url")
        self._notify_on = frozenset(notify_on)
        self._monitor, self._mode, self._prefix = monitor, mode, prefix
        self._timeout, self._retries, self._wait = timeout, retries, wait_at_end
        self._sender: Sender | None = None
        self._best: tuple[float, int] | None = None  # value and step
        self._told_exception = self._told_missing = False
        # What is not needed is switched off: a bare loop need not tell it.
        tracks = bool({"best_model", "training_end"} & self._notify_on)
        of_validation = monitor.startswith(("val/", "eval/"))
        needed = {
            "on_epoch_end": tracks and not of_validation,
            "on_validation_end": (tracks and of_validation) or "validation" in notify_on,
            "on_checkpoint_save": "checkpoint" in notify_on,
            "on_exception": "exception" in notify_on,
        }
        self.__dict__.update((event, None) for event, used in needed.items() if not used)

    def on_train_start(self, model: Any, step: int, run: Any = None) -> None:
        """Tell that training starts."""
        self._told_exception = False
        if "training_start" in self._notify_on:
            name = "" if run is None else f", run {run.id}"
            after = f" after step {step}" if step else ""
            self._send(f"Training starts{after}: {type(model).__name__}{name}.")

    def on_validation_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Tell what was found, and whether it is the best so far."""
        if "validation" in self._notify_on:
            self._send(f"Validation at step {step}: {metrics_text(metrics)}.")
        if self._monitor.startswith(("val/", "eval/")):
            self._compare(step, metrics)

    def on_epoch_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Tell whether the epoch is the best so far."""
        self._compare(step, metrics)

    def on_checkpoint_save(self, checkpoint_path: Any, step: int) -> None:
        """Tell where the checkpoint is."""
        self._send(f"Checkpoint of step {step}: {checkpoint_path}.")

    def on_exception(self, exception: BaseException, step: int) -> None:
        """Tell what went wrong."""
        self._told_exception = True
        self._send(f"Training failed at step {step}: {type(exception).__name__}: {exception}")

    def on_train_end(self, status: str, step: int, trainer: Any) -> None:
        """Tell how it ended, and wait a little for what has not been sent."""
        if "training_end" in self._notify_on and not self._told_exception:
            best = ""
            if self._best is not None:
                value, when = self._best
                best = f" Best {self._monitor}: {number_text(value)}, at step {when}."
            how = "failed" if status == "error" else status
            reason = getattr(trainer, "stop_reason", None)
            why = f" ({reason})" if reason else ""
            self._send(f"Training {how} at step {step}{why}.{best}")
        if self._sender is not None:
            self._sender.close(self._wait)
            self._sender = None

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        return {"best": None if self._best is None else list(self._best)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the best value back, so that a resumed run tells only what is better still."""
        best = state["best"]
        self._best = None if best is None else (float(best[0]), int(best[1]))

    def _compare(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._monitor not in metrics:
            if "best_model" in self._notify_on and not self._told_missing:
                self._told_missing = True
                log.warning(
                    "NotificationHook: there is no '%s' to tell the best model by. There are: %s.",
                    self._monitor,
                    listed(metrics),
                )
            return
        value = float(metrics[self._monitor])
        if math.isnan(value) or not self._is_better(value):
            return
        self._best = value, step
        if "best_model" in self._notify_on:
            self._send(f"New best model at step {step}: {self._monitor} {number_text(value)}.")

    def _is_better(self, value: float) -> bool:
        if self._best is None:
            return True
        return value < self._best[0] if self._mode == "min" else value > self._best[0]

    def _send(self, text: str) -> None:
        if self._sender is None:
            self._sender = Sender("notification", timeout=self._timeout, retries=self._retries)
        text = f"{self._prefix}{text}"
        text = text if len(text) <= LONGEST else text[:LONGEST] + "…"
        for sign, escape in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):  # as Slack reads text
            text = text.replace(sign, escape)
        self._sender.send(self._url, json.dumps({"text": text}).encode())
