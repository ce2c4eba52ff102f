"""A run's manifest: what ran, with which code and configuration, and how it ended."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from hookline._version import __version__
from hookline.checkpoint.disk import write_atomic
from hookline.errors import RunError
from hookline.runs.plain import plain

__all__ = [
    "MANIFEST_VERSION",
    "new_manifest",
    "new_part",
    "new_run_id",
    "now",
    "read_manifest",
    "write_manifest",
]

MANIFEST_VERSION = 1
_FORMAT = "hookline.run"


def now() -> str:
    """Return the time, in UTC, as manifests write it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def new_run_id() -> str:
    """Return an id such as `20261115-210655-3f9c7b`: UTC to 15 µs to sort by, a random byte."""
    moment = time.time()
    fraction = int(moment % 1 * 65536)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(moment))
    return f"{stamp}-{fraction:04x}{secrets.token_hex(1)}"


def new_manifest(
    run_id: str, *, config: Mapping[str, Any], seed: Any, hooks: Sequence[Any]
) -> dict[str, Any]:
    """Return the manifest of a run that starts now."""
    part = new_part()
    return {
        "format": _FORMAT,
        "version": MANIFEST_VERSION,
        "run_id": run_id,
        "status": "training",
        "created": part["started"],
        "started": part["started"],
        "ended": None,
        "last_error": None,
        "seed": plain(seed),
        "config": plain(config),
        "hooks": plain(list(hooks)),
        "command": part["command"],
        "versions": part["versions"],
        "platform": part["platform"],
        "lost_records": 0,
        "parts": [part],
    }


def new_part() -> dict[str, Any]:
    """Return the facts of one process's part of a run; a resumed run has several."""
    return {
        "started": now(),
        "ended": None,
        "status": "training",
        "command": plain(sys.orig_argv),
        "versions": {
            "hookline": __version__,
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
        },
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace a run's manifest atomically."""
    text = json.dumps(manifest, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_atomic(folder / "manifest.json", text)


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
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise RunError(f"{file} is not the manifest of a run: its 'format' is not '{_FORMAT}'.")
    version = manifest.get("version")
    if not isinstance(version, int) or version > MANIFEST_VERSION:
        raise RunError(
            f"{file} has version {version!r}; this hookline reads up to {MANIFEST_VERSION}. "
            "Install a newer hookline: pip install -U hookline"
        )
    return manifest
