"""NotificationHook: posts messages about training to a chat."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from html import escape
from typing import Any, Literal

from hookline.context import to_float
from hookline.errors import ConfigError, listed
from hookline.hook import HookGroup
from hookline.hooks.metric_lookup import number_text
from hookline.hooks.notification.http import Secret, Sender, checked_url
from hookline.masking import mask_text
from hookline.options import BuiltIn
from hookline.tensors.name_patterns import module_class

log = logging.getLogger("hookline")

Occasion = Literal["training_start", "training_end", "best_model", "exception"]

VARIABLE = "HOOKLINE_WEBHOOK_URL"
TIMEOUT, RETRIES = 10.0, 3  # seconds, and how often to repeat what failed
WAIT_AT_END = 5.0  # seconds, for pending messages
MAX_LENGTH = 2000  # characters of a message; exceptions may have very long texts


class NotificationHook(BuiltIn):
    """Posts messages about training to a webhook of Slack, or one that accepts the same JSON.

    Messages are sent from a separate thread, so a slow or unreachable server does not slow down
    training. The URL is a secret: it is neither logged nor written to the run. Secrets in messages,
    such as in the text of an exception, are masked as in the log. Redirects are logged, and
    not followed.

    Args:
        webhook_url: the URL; None: the value of the environment variable HOOKLINE_WEBHOOK_URL.
        notify_on: the occasions for messages. If an exception was reported, there is no message
            for the end of training.
        monitor: the metric that determines the best model.
        mode: whether a lower (`min`) or a higher value (`max`) is better.
    """

    cost = (
        "Nothing per batch; reads metrics at the end of validations, and waits at most five "
        "seconds when training ends."
    )
    secret_options = frozenset({"webhook_url"})
    hookline_group = HookGroup.WRITER
    ranks = "main"

    def __init__(
        self,
        webhook_url: Secret | None = None,
        notify_on: list[Occasion] | tuple[Occasion, ...] = ("training_end", "exception"),
        monitor: str = "val/loss",
        mode: Literal["min", "max"] = "min",
    ) -> None:
        url = webhook_url if webhook_url is not None else os.environ.get(VARIABLE)
        if url is None:
            raise ConfigError(
                "NotificationHook has no URL to post to. Pass webhook_url, or set the environment "
                f"variable {VARIABLE}."
            )
        self._url = checked_url(url, "NotificationHook: webhook_url")
        self._notify_on = frozenset(notify_on)
        self._monitor, self._mode = monitor, mode
        self._sender: Sender | None = None
        self._best: tuple[float, int] | None = None  # value and step
        self._reported_exception = self._warned_missing = False
        # Unused events are turned off, so that a bare loop need not provide them.
        tracks_best = bool({"best_model", "training_end"} & self._notify_on)
        is_val_metric = monitor.startswith(("val/", "eval/"))
        needed = {
            "on_epoch_end": tracks_best and not is_val_metric,
            "on_validation_end": tracks_best and is_val_metric,
            "on_exception": "exception" in notify_on,
        }
        self.__dict__.update((event, None) for event, used in needed.items() if not used)

    def on_train_start(self, model: Any, step: int, run: Any = None) -> None:
        self._reported_exception = False
        if "training_start" in self._notify_on:
            name = "" if run is None else f", run {run.id}"
            after = f" after step {step}" if step else ""
            self._send(f"Training starts{after}: {module_class(model).__name__}{name}.")

    def on_validation_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._compare(step, metrics)

    def on_epoch_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._compare(step, metrics)

    def on_exception(self, exception: BaseException, step: int) -> None:
        self._reported_exception = True
        self._send(f"Training failed at step {step}: {type(exception).__name__}: {exception}")

    def on_train_end(self, status: str, step: int, trainer: Any) -> None:
        """Report the status, and wait a little for pending messages."""
        if "training_end" in self._notify_on and not self._reported_exception:
            best = ""
            if self._best is not None:
                value, best_step = self._best
                best = f" Best {self._monitor}: {number_text(value)}, at step {best_step}."
            how = "failed" if status == "error" else status
            reason = getattr(trainer, "stop_reason", None)
            why = f" ({reason})" if reason else ""
            self._send(f"Training {how} at step {step}{why}.{best}")
        if self._sender is not None:
            self._sender.close(WAIT_AT_END)
            self._sender = None

    def state_dict(self) -> dict[str, Any]:
        return {"best": None if self._best is None else list(self._best)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        best = state["best"]
        self._best = None if best is None else (float(best[0]), int(best[1]))

    def _compare(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._monitor not in metrics:
            if "best_model" in self._notify_on and not self._warned_missing:
                self._warned_missing = True
                text = "NotificationHook: the metric '%s' for the best model is missing. "
                log.warning(text + "The metrics are: %s.", self._monitor, listed(metrics))
            return
        value = to_float(metrics[self._monitor])
        best = None if self._best is None else self._best[0]
        is_better = best is None or (value < best if self._mode == "min" else value > best)
        if is_better and not math.isnan(value):
            self._best = value, step
            if "best_model" in self._notify_on:
                self._send(f"New best model at step {step}: {self._monitor} {number_text(value)}.")

    def _send(self, text: str) -> None:
        if self._sender is None:
            self._sender = Sender("notification", timeout=TIMEOUT, retries=RETRIES)
        text = mask_text(text)
        text = text if len(text) <= MAX_LENGTH else text[:MAX_LENGTH] + "…"
        text = escape(text, quote=False)  # as Slack requires
        self._sender.send(self._url, json.dumps({"text": text}).encode())
