"""Names in manifests, pointers and logs: plain file names that stay in their folder."""

from __future__ import annotations

import re
from typing import Any, TypeGuard

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")
# Windows opens devices by these names, with any suffix.
_DEVICES = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)


def is_plain_name(name: Any) -> TypeGuard[str]:
    """Return whether a value is a plain file name: letters, digits and `._=+-`, up to 200."""
    return isinstance(name, str) and bool(_PLAIN.fullmatch(name)) and not _DEVICES.fullmatch(name)
