"""Sender: HTTP requests in the background, which neither slow down nor stop training.

URLs may contain secrets, so nothing that is logged here contains more of one than its host. For the
same reason errors are logged by their type, without their text.

A redirected GET is followed. A redirected POST is followed where the server asks to repeat it
(status 307 and 308). With another status it would become a GET without the message, so it is not
followed, and the problem names the host. No request leaves HTTPS, and none has credentials.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Annotated, Any
from urllib.parse import urljoin, urlsplit

from pydantic import SkipValidation

from hookline.errors import ConfigError
from hookline.printable import printable

__all__ = ["Secret", "Sender", "checked_url"]

log = logging.getLogger("hookline")

Secret = Annotated[str, SkipValidation]
"""A string that no error message shows: it is validated where it is used."""

MAX_PAUSE = 30.0


def checked_url(url: Any, option: str) -> str:
    """Return a valid URL; the error for others does not show them."""
    if isinstance(url, str) and url.isascii() and url.isprintable() and " " not in url:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname)
            usable = usable and parts.port != 0  # reading it raises an error if it is not a number
        except ValueError:  # its text contains the URL
            usable = False
        if usable:
            return url
    raise ConfigError(
        f"{option} is not a valid URL (it is not shown, because it may contain a secret). "
        "Expected a string such as https://host/path."
    )


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
        self._pending: deque[tuple[str, bytes | None]] = deque()
        self._max_pending = max_pending
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._sending = self._failing = False

    def send(self, url: str, json: bytes | None = None) -> None:
        """Queue a request, a POST of JSON or a GET; this does not wait for the server."""
        with self._changed:
            if len(self._pending) >= self._max_pending:
                self._pending.popleft()
                self.lost += 1
            self._pending.append((url, json))
            if self._thread is None:
                name = f"hookline {self._what}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def close(self, wait: float) -> None:
        """Wait at most this many seconds for pending requests, and drop the rest."""
        end = time.monotonic() + wait
        with self._changed:
            while self._thread is not None and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            self._closed.set()
            self.lost += len(self._pending) + self._sending
            self._pending.clear()
        if self.lost:
            log.warning("%d %s(s) could not be sent.", self.lost, self._what)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._pending:
                    self._thread = None
                    self._changed.notify_all()
                    return
                url, json = self._pending.popleft()
                self._sending = True
            problem = self._deliver(url, json)
            with self._changed:
                self._sending = False
                # After close() it is counted already.
                lost = problem is not None and not self._closed.is_set()
                self.lost += lost
            if lost and not self._failing:  # once, until a request succeeds again
                log.warning("A %s could not be sent: %s.", self._what, problem)
            self._failing = lost

    def _deliver(self, url: str, json: bytes | None) -> str | None:
        """Send a request with retries; return the problem if all attempts failed."""
        pause = self._pause
        for attempts_left in reversed(range(self._retries + 1)):
            problem, can_retry = _request(url, json, self._timeout)
            if problem is None or not can_retry or not attempts_left or self._closed.wait(pause):
                return problem
            pause = min(2 * pause, MAX_PAUSE)
        raise AssertionError("unreachable")


def _request(url: str, json: bytes | None, timeout: float) -> tuple[str | None, bool]:
    """Send a request; return the problem, if any, and whether a retry may help."""
    from urllib.error import HTTPError, URLError  # here, because ssl takes a while to import
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Redirects(HTTPRedirectHandler):
        def redirect_request(
            self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
        ) -> Request | None:
            leaves_https = req.type == "https" and urlsplit(newurl).scheme != "https"
            if leaves_https or urlsplit(newurl).scheme not in ("http", "https"):
                return None  # then the response is an error
            if req.data is None:
                return super().redirect_request(req, fp, code, msg, headers, newurl)
            repeats = code in (307, 308)
            return Request(newurl, data=req.data, headers=req.headers) if repeats else None

        def http_error_302(self, req: Request, fp: Any, code: int, msg: str, headers: Any) -> Any:
            try:
                return super().http_error_302(req, fp, code, msg, headers)
            except ValueError:  # the location is no URL
                return None

        http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    headers = {"User-Agent": "hookline"}
    if json is not None:
        headers["Content-Type"] = "application/json"
    try:
        request = Request(url, data=json, headers=headers)
        with build_opener(Redirects).open(request, timeout=timeout):
            return None, False
    except HTTPError as error:
        error.close()
        if 300 <= error.code < 400:
            return _describe_redirect(error.code, error.url, error.headers["Location"]), False
        can_retry = error.code >= 500 or error.code in (408, 429)
        return f"the server responded with {error.code}", can_retry
    except Exception as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            return f"no response within {timeout:g} seconds", True
        kind = type(reason).__name__
        # Errors of other modules (name resolution, SSL) use `errno` for numbers of their own.
        if isinstance(reason, OSError) and reason.errno and type(reason).__module__ == "builtins":
            kind += f", {os.strerror(reason.errno)}"
        return kind, True


def _describe_redirect(code: int, url: str | None, location: str | None) -> str:
    """Return what the server said; of the URL it named only the host, the rest may be secret."""
    try:
        target = urlsplit(urljoin(url or "", location or ""))
        scheme, host = target.scheme, target.netloc.rpartition("@")[2]
    except ValueError:
        scheme = host = ""
    if not host or location is None:
        return f"the server responded with {code}, a redirect to no valid URL"
    return (
        f"the server responded with {code}, a redirect to {scheme}://{printable(host)}, "
        "which was not followed. If that is the right server, configure its URL"
    )
