"""Text from elsewhere as it is shown on a terminal, in a message or in HTML."""

from __future__ import annotations

import re

__all__ = ["escape_controls", "printable"]

# Control characters, marks that change the direction of text, invisible characters, line and
# paragraph separators, lone surrogates.
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def printable(text: object, limit: int = 200) -> str:
    """Return a name or value on one line, with control characters escaped, cut after `limit`."""
    shown = str(text)
    shown = shown if len(shown) <= limit else shown[: max(limit - 1, 0)] + "…"
    return _CONTROLS.sub(_escape, shown)


def escape_controls(text: str) -> str:
    """Return a text of several lines with control characters escaped, except tab and line feed."""
    return _CONTROLS.sub(lambda found: found[0] if found[0] in "\n\t" else _escape(found), text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    common = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    if found[0] in common:
        return common[found[0]]
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )
