"""A run's manifest: what ran, with which code and configuration, how it ended.

The manifest describes the newest part of the run: its configuration, hooks, code and versions. A
part is what one process trained. Each part has the facts of its own process; configuration, hooks
and packages are kept in an earlier part only if they changed afterwards.

Reading a manifest does not import torch.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hookline.checkpoint.atomic_files import write_atomic
from hookline.errors import RunError
from hookline.runs.environment import describe_environment
from hookline.runs.git import read_git_state
from hookline.runs.jsonable import to_jsonable
from hookline.runs.recorded_config import config_hash

__all__ = [
    "ManifestData",
    "continue_manifest",
    "last_write_time",
    "new_manifest",
    "new_run_id",
    "read_run_manifest",
    "utc_now",
    "write_run_manifest",
]

_FORMAT = "hookline.run"
_VERSION = 1
_PART_FIELDS = ("started", "ended", "status", "host", "pid", "pid_started", "pid_namespace")
_LONG_FIELDS = ("config", "hooks", "packages", "seed", "torch_seed")  # in a part if they changed


def utc_now() -> str:
    """Return the current time in UTC, as manifests have it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def new_run_id() -> str:
    """Return an id such as `20261115-210655-3f9c7b`.

    It consists of the UTC time, to 15 µs, so that ids sort by time, and a random byte.
    """
    seconds = time.time()
    fraction = int(seconds % 1 * 65536)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))
    return f"{stamp}-{fraction:04x}{secrets.token_hex(1)}"


def read_run_manifest(folder: Path) -> dict[str, Any]:
    """Return a run's manifest.

    Raises:
        RunError: There is none, it cannot be read, or a newer version wrote it.
    """
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{folder} is not a run: it has no manifest.json. Give the folder of a run, "
            "runs/<run_id>."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise RunError(f"{file} is not the manifest of a run: its 'format' is not '{_FORMAT}'.")
    version = manifest.get("version")
    if not isinstance(version, int) or version > _VERSION:
        raise RunError(
            f"{file} has version {version!r}, and this hookline reads up to {_VERSION}. "
            "Install a newer hookline: pip install -U hookline"
        )
    return manifest


def write_run_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace a run's manifest atomically."""
    text = json.dumps(manifest, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_atomic(folder / "manifest.json", text)


def last_write_time(folder: Path) -> float | None:
    """Return when metrics or events of a run were last written; None if there are none."""
    files = [folder / name for name in ("metrics.jsonl", "events.jsonl")]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=None)


class ManifestData:
    """The manifest fields that are known when a part of a run starts.

    Args:
        config: The resolved configuration. Values that JSON lacks are written as their `repr`.
            None: it is the same as before.
        seed: The seed.
        hooks: A description of each hook, in order; None: they are the same as before.
        device: Where the model is trained.
    """

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        seed: Any = None,
        hooks: Sequence[Any] | None = None,
        device: Any = None,
    ) -> None:
        self._device = device
        self._fields: dict[str, Any] = {}
        if config is not None:
            self._fields |= {"config": to_jsonable(config), "config_hash": config_hash(config)}
        if hooks is not None:
            self._fields["hooks"] = to_jsonable(list(hooks))
        if self._fields:
            import torch

            self._fields |= {"seed": to_jsonable(seed), "torch_seed": torch.initial_seed()}

    def new_part(self) -> dict[str, Any]:
        """Return all fields of a part that starts now."""
        process = {"git": read_git_state(), **describe_environment(self._device)}
        started = {"started": utc_now(), "ended": None, "status": "training"}
        return {**started, **self._fields, **process}


def new_manifest(run_id: str, data: ManifestData) -> dict[str, Any]:
    """Return the manifest of a run that starts now."""
    part = data.new_part()
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "run_id": run_id,
        "status": "training",
        "created": part["started"],
        "started": part["started"],
        "ended": None,
        "last_error": None,
        **_without(part, _PART_FIELDS),
        "lost_records": 0,
        "parts": [_without(part, _LONG_FIELDS)],
    }


def continue_manifest(
    folder: Path, manifest: Mapping[str, Any], data: ManifestData
) -> dict[str, Any]:
    """Return the manifest of a run that is resumed now, with a new part."""
    part = data.new_part()
    parts = [dict(earlier) for earlier in manifest.get("parts") or ()]
    if parts:
        earlier = {n: manifest[n] for n in _LONG_FIELDS if n in manifest and n in part}
        parts[-1] |= {name: value for name, value in earlier.items() if value != part[name]}
        if parts[-1].get("ended") is None:  # its process died
            written = last_write_time(folder)
            ended = None if written is None else datetime.fromtimestamp(written, UTC).isoformat()
            parts[-1] |= {"status": "lost", "ended": ended}
    return {
        **manifest,
        **{"status": "training", "ended": None, "last_error": None},
        **_without(part, _PART_FIELDS),
        "parts": [*parts, _without(part, _LONG_FIELDS)],
    }


def _without(part: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in names}
