"""One filter for what Hookline logs: secrets are masked, control characters escaped."""

from __future__ import annotations

import logging
from pathlib import PurePath
from traceback import format_exception
from typing import Any

from hookline.masking import mask_text
from hookline.printable import escape_controls, printable_message

_LOGGERS = ("hookline", "hookline.training")  # a logger does not inherit filters


def filter_log_records() -> None:
    """Mask secrets and escape control characters in the records of Hookline's loggers."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_filter)  # no effect if it is there already


def _filter(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(map(_escape, record.args))
    if not record.args:
        record.msg = _escape(record.msg)
    try:
        message = record.getMessage()
    except Exception:  # arguments that do not match; logging reports that itself
        return True
    if (masked := mask_text(message)) != message:
        record.msg, record.args = masked, ()
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        text = "".join(format_exception(record.exc_info[1])).rstrip("\n")
        shown = escape_controls(mask_text(text))
        if shown != text:
            record.exc_text = shown  # formatters show it instead of exc_info
    return True


def _escape(value: Any) -> Any:
    """Return an argument of a message; numbers and lazy values are formatted only if shown."""
    is_text = isinstance(value, str | PurePath | BaseException)
    return printable_message(value) if is_text else value
