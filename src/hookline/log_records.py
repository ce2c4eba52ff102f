"""Log records of Hookline: names from elsewhere are shown with control characters escaped."""

from __future__ import annotations

import logging
from pathlib import PurePath
from traceback import format_exception
from typing import Any

from hookline.printable import escape_controls, printable_message

__all__ = ["make_records_printable"]

_LOGGERS = ("hookline", "hookline.training")  # a logger does not inherit filters


def make_records_printable() -> None:
    """Escape control characters in the messages and tracebacks of Hookline's loggers."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_escape_record)


def _escape_record(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(map(_escape_argument, record.args))
    if not record.args:
        record.msg = _escape_argument(record.msg)
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        text = "".join(format_exception(record.exc_info[1])).rstrip("\n")
        escaped = escape_controls(text)
        if escaped != text:  # otherwise the traceback is formatted by the handler
            record.exc_text = escaped
    return True


def _escape_argument(value: Any) -> Any:
    """Return an argument of a message; numbers and lazy values are formatted only if shown."""
    is_text = isinstance(value, str | PurePath | BaseException)
    return printable_message(value) if is_text else value
