"""Sender: HTTP requests in the background, that neither slow nor stop training.

Addresses may hold secrets, so no message that is logged here contains one: of an error its kind is
told, and not its text.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import SkipValidation

from hookline.errors import ConfigError

__all__ = ["MASK", "Secret", "Sender", "checked_url"]

log = logging.getLogger("hookline")

MASK = "***"
Secret = Annotated[str, SkipValidation]
"""A string that no error shows: it is checked where it is used."""

LONGEST_PAUSE = 30.0


def checked_url(url: Any, what: str) -> str:
    """Return an address that can be used; the error does not show it."""
    if isinstance(url, str) and url.isascii() and url.isprintable() and " " not in url:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname)
            usable = usable and parts.port != 0  # reading it fails when it is no number
        except ValueError:  # its text has the address
            usable = False
        if usable:
            return url
    raise ConfigError(
        f"{what} is no address that can be used (it is not shown, as it may hold a secret). "
        "Expected a string such as https://host/path."
    )


class Sender:
    """Sends requests one after the other, from a thread that is there while something waits.

    Args:
        what: What is sent, for messages: "notification".
        timeout: Seconds to wait for a server, at each try.
        retries: How often to try again when a server fails or cannot be reached.
        pause: Seconds before the first of these; each further pause is twice as long.
        most: How many requests may wait; then the oldest is dropped.
    """

    def __init__(
        self, what: str, *, timeout: float, retries: int, pause: float = 0.5, most: int = 100
    ) -> None:
        self.lost = 0
        self._what, self._timeout, self._retries, self._pause = what, timeout, retries, pause
        self._waiting: deque[tuple[str, bytes | None]] = deque()
        self._most = most
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._sending = self._failing = False

    def send(self, url: str, json: bytes | None = None) -> None:
        """Send a request soon, a POST of JSON or a GET; this never waits for a server."""
        with self._changed:
            if len(self._waiting) >= self._most:
                self._waiting.popleft()
                self.lost += 1
            self._waiting.append((url, json))
            if self._thread is None:
                name = f"hookline {self._what}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()

    def close(self, wait: float) -> None:
        """Wait so many seconds at most for what has not been sent, and drop the rest."""
        end = time.monotonic() + wait
        with self._changed:
            while self._thread is not None and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            self._closed.set()
            self.lost += len(self._waiting) + self._sending
            self._waiting.clear()
        if self.lost:
            log.warning("%d %s(s) could not be sent.", self.lost, self._what)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                url, json = self._waiting.popleft()
                self._sending = True
            problem = self._deliver(url, json)
            with self._changed:
                self._sending = False
                lost = problem is not None and not self._closed.is_set()  # else it was counted
                self.lost += lost
            if lost and not self._failing:  # once, until one arrives again
                log.warning("A %s could not be sent: %s.", self._what, problem)
            self._failing = lost

    def _deliver(self, url: str, json: bytes | None) -> str | None:
        """Try until it arrives; return why it did not."""
        pause = self._pause
        for tries_left in reversed(range(self._retries + 1)):
            problem, again = _request(url, json, self._timeout)
            if problem is None or not again or not tries_left or self._closed.wait(pause):
                return problem
            pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError("unreachable")


def _request(url: str, json: bytes | None, timeout: float) -> tuple[str | None, bool]:
    """Send a request; return what went wrong, if anything, and whether to try again."""
    from urllib.error import HTTPError, URLError  # here: with ssl, they take a while to import
    from urllib.request import Request, urlopen

    headers = {"User-Agent": "hookline"}
    if json is not None:
        headers["Content-Type"] = "application/json"
    try:
        with urlopen(Request(url, data=json, headers=headers), timeout=timeout):
            return None, False
    except HTTPError as error:
        error.close()
        return f"the server answered {error.code}", error.code >= 500 or error.code in (408, 429)
    except Exception as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            return f"no answer in {timeout:g} seconds", True
        number = reason.errno if isinstance(reason, OSError) else None
        # Errors of the operating system have numbers that others (of addresses, of SSL) reuse.
        plain = type(reason).__module__ == "builtins" and number is not None
        kind = type(reason).__name__
        return f"{kind}, {os.strerror(number)}" if plain and number else kind, True
