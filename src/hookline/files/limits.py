"""How large files from elsewhere may be before they are refused."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, fields

from hookline.errors import ConfigError

_PREFIX = "HOOKLINE_MAX_"


@dataclass
class FileLimits:
    """Sizes in bytes above which a file is refused, so that a hostile one cannot fill the memory.

    `hookline.file_limits` is in force. Its attributes can be set, or, before the process starts,
    environment variables such as `HOOKLINE_MAX_MANIFEST_BYTES=200_000_000`.

    Attributes:
        manifest_bytes: Manifest of a run or of a checkpoint, lease or pointer.
        line_bytes: One line of a log of metrics or events.
        state_bytes: `state.json` of a checkpoint, and the header of a safetensors file.
        config_bytes: Config file.
        hole_bytes: What the files of a checkpoint have without data on the disk: reading it takes
            time and memory, and a sparse file of any size is quickly sent.
    """

    manifest_bytes: int = 64 << 20
    line_bytes: int = 16 << 20
    state_bytes: int = 1 << 30
    config_bytes: int = 4 << 20
    hole_bytes: int = 4 << 30

    @classmethod
    def from_environment(cls) -> FileLimits:
        """Return the default limits with those that environment variables set."""
        values: dict[str, int] = {}
        for field in fields(cls):
            variable = _PREFIX + field.name.upper()
            text = os.environ.get(variable)
            if text is None:
                continue
            with suppress(ValueError):
                values[field.name] = int(text)
            if values.get(field.name, 0) <= 0:
                raise ConfigError(
                    f"The environment variable {variable} is {text!r}. Expected a number of bytes."
                )
        return cls(**values)


file_limits = FileLimits.from_environment()
"""The limits in force."""
