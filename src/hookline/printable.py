"""Text from elsewhere as it is shown on a terminal, in a message, in a log record or in HTML."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import PurePath
from traceback import format_exception
from typing import Any

from hookline.masking import mask_text

# Control characters, marks that change the direction of text, invisible characters, line and
# paragraph separators, lone surrogates. Joiners and variation selectors belong to emoji and to
# some scripts; beside ASCII they are only invisible.
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb"
    "\U00013430-\U00013440\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    "|(?<![^\x00-\x7f])[\u200c\u200d\ufe00-\ufe0f]|[\u200c\u200d](?![^\x00-\x7f])"
)

_MESSAGE_LINE = 1200  # characters of one line of a message
_MAX_LINES = 200
_TAB = "\t"
_LOGGERS = ("hookline", "hookline.training")  # a logger does not inherit filters


def printable(text: object, limit: int = 200) -> str:
    """Return a name or value on one line, with control characters escaped, cut after `limit`."""
    return _cut(escape_controls(str(text)[: limit + 1], allowed=""), limit)


def printable_lines(text: str, limit: int = 200, line_limit: int = 2000) -> str:
    """Return a text of several lines with control characters escaped."""
    lines = text.split("\n", limit)
    shown = [_cut(escape_controls(line[: line_limit + 1]), line_limit) for line in lines[:limit]]
    left_out = lines[limit].count("\n") + 1 if len(lines) > limit else 0
    return "\n".join(shown + [f"… and {left_out} more lines"] * bool(left_out))


class MessageLines(str):
    """A message of several lines, whose control characters are escaped in each of them.

    In any other text, a line feed is taken for a part of a name.
    """

    __slots__ = ()


def message_lines(*lines: object) -> MessageLines:
    """Return a message of several lines, with control characters escaped, all but one indented."""
    shown = [line for one in lines for line in printable_message(one).split("\n")]
    indented = [line if line.startswith("  ") else f"  {line}" for line in shown[1:_MAX_LINES]]
    more = len(shown) - _MAX_LINES
    indented += [f"  … and {more} more lines"] * (more > 0)
    return MessageLines("\n".join([*shown[:1], *indented]))


def printable_message(text: object) -> str:
    """Return a message that contains names, on one line unless `message_lines` has made it."""
    text = text if isinstance(text, str) else str(text)
    return text if isinstance(text, MessageLines) else _cut_middle(text)


def quote_lines(text: str) -> str:
    """Return the text of an exception: its first line, and the others marked as parts of it."""
    return printable_lines(text).replace("\n", "\n  | ")


def _cut_middle(line: str) -> str:
    """Return a line of a message; a long one keeps its end, which says what to do."""
    half = _MESSAGE_LINE // 2
    shown = escape_controls(line[: _MESSAGE_LINE + 1], allowed=_TAB)
    if len(shown) <= _MESSAGE_LINE:
        return shown
    return f"{shown[:half]} […] {escape_controls(line[-half:], allowed=_TAB)[-half:]}"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def escape_controls(
    text: str, allowed: str = "\n\t", escape: Callable[[str], str] = _escape
) -> str:
    """Return a text with control characters escaped, except tab and line feed."""
    if text.isascii() and text.isprintable():
        return text

    def escape_control(found: re.Match[str]) -> str:
        return found[0] if found[0] in allowed else escape(found[0])

    return _CONTROLS.sub(escape_control, text)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


# -- log records -----------------------------------------------------------------------------------


def filter_log_records() -> None:
    """Mask secrets and escape control characters in the records of Hookline's loggers."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_filter)  # no effect if it is there already


def _filter(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(map(_escape_argument, record.args))
    if not record.args:
        record.msg = _escape_argument(record.msg)
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


def _escape_argument(value: Any) -> Any:
    """Return an argument of a message; numbers and lazy values are formatted only if shown."""
    is_text = isinstance(value, str | PurePath | BaseException)
    return printable_message(value) if is_text else value
