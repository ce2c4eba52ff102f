"""A run's manifest as it is read: what ran, with which code and configuration, how it ended.

Nothing here imports torch: whoever looks at runs need not wait for it.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hookline.errors import RunError

__all__ = ["FORMAT", "MANIFEST_VERSION", "new_run_id", "now", "read_manifest"]

MANIFEST_VERSION = 1
FORMAT = "hookline.run"


def now() -> str:
    """Return the time, in UTC, as manifests write it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def new_run_id() -> str:
    """Return an id such as `20261115-210655-3f9c7b`: UTC to 15 µs to sort by, a random byte."""
    moment = time.time()
    fraction = int(moment % 1 * 65536)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(moment))
    return f"{stamp}-{fraction:04x}{secrets.token_hex(1)}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a run's manifest, or say why there is none."""
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{folder} is no run: it has no manifest.json. Give a run's own folder, runs/<run_id>."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RunError(f"{file} is not the manifest of a run: its 'format' is not '{FORMAT}'.")
    version = manifest.get("version")
    if not isinstance(version, int) or version > MANIFEST_VERSION:
        raise RunError(
            f"{file} has version {version!r}; this hookline reads up to {MANIFEST_VERSION}. "
            "Install a newer hookline: pip install -U hookline"
        )
    return manifest
