"""Sender: HTTP requests in the background, which neither slow down nor stop training.

URLs may contain secrets, so nothing that is logged here contains one. For the same reason errors
are logged by their type, without their text.

A redirect is not followed: it might lead out of HTTPS, and a POST would lose its message.
"""

from __future__ import annotations

import logging
import threading
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import SkipValidation

from hookline.errors import ConfigError
from hookline.hooks.background_worker import BackgroundWorker

log = logging.getLogger("hookline")

Secret = Annotated[str, SkipValidation]
"""A string that no error message shows: it is validated where it is used."""

MAX_PAUSE = 30.0


def checked_url(url: Any, option: str) -> str:
    """Return a valid URL; the error for others does not show them."""
    is_text = isinstance(url, str) and url.isascii() and url.isprintable() and " " not in url
    try:
        parts = urlsplit(url if is_text else "")
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return str(url)
    except ValueError:  # of a port that is not a number; its text contains the URL
        pass
    raise ConfigError(
        f"{option} is not a valid URL (it is not shown, because it may contain a secret). "
        "Expected a string such as https://host/path."
    ) from None


class Sender:
    """Sends requests one after another, from a thread that runs while requests are pending.

    Requests that fail are repeated after `pause` seconds, which double for each further attempt.
    If more than `max_pending` are pending, the oldest is dropped. `what` names them in messages.
    """

    def __init__(
        self, what: str, *, timeout: float, retries: int, pause: float = 0.5, max_pending: int = 100
    ) -> None:
        self.lost = 0
        self._what, self._timeout, self._retries, self._pause = what, timeout, retries, pause
        self._failing = False
        self._worker = BackgroundWorker(f"hookline {what}", self._deliver, max_pending)

    def send(self, url: str, json: bytes | None = None) -> None:
        """Queue a request, a POST of JSON or a GET; this does not wait for the server."""
        dropped = self._worker.add((url, json))
        self.lost += len(dropped)

    def close(self, wait: float) -> None:
        """Wait at most this many seconds for pending requests, and drop the rest."""
        left = self._worker.end(wait)
        self.lost += len(left)
        if self.lost:
            log.warning("%d %s(s) could not be sent.", self.lost, self._what)

    def _deliver(self, request: tuple[str, bytes | None], closed: threading.Event) -> None:
        problem, pause = None, self._pause
        for attempts_left in reversed(range(self._retries + 1)):
            problem, can_retry = _request(*request, self._timeout)
            if problem is None or not can_retry or not attempts_left or closed.wait(pause):
                break
            pause = min(2 * pause, MAX_PAUSE)
        is_lost = problem is not None and not closed.is_set()  # after close() it is counted already
        self.lost += is_lost
        if is_lost and not self._failing:  # once, until a request succeeds again
            log.warning("A %s could not be sent: %s.", self._what, problem)
        self._failing = is_lost


def _request(url: str, json: bytes | None, timeout: float) -> tuple[str | None, bool]:
    """Send a request; return the problem, if any, and whether a retry may help."""
    from urllib.error import HTTPError, URLError  # here, because ssl takes a while to import
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):
        def redirect_request(
            self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
        ) -> None:
            """Refuse: then the response is an error."""

    headers = {"User-Agent": "hookline"}
    if json is not None:
        headers["Content-Type"] = "application/json"
    try:
        request = Request(url, data=json, headers=headers)
        with build_opener(NoRedirects).open(request, timeout=timeout):
            return None, False
    except HTTPError as error:
        error.close()
        is_redirect = 300 <= error.code < 400
        redirect = ", a redirect, which is not followed: configure its URL" if is_redirect else ""
        can_retry = error.code >= 500 or error.code in (408, 429)
        return f"the server responded with {error.code}{redirect}", can_retry
    except Exception as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            return f"no response within {timeout:g} seconds", True
        return type(reason).__name__, True
