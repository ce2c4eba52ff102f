"""A run's manifest as it is written: the facts of a run when it starts, and when it goes on.

The manifest itself tells of the newest part of the run: its configuration, hooks, code and
versions. Each part tells what its own process had; configuration, hooks and packages stand in an
earlier part only where they were other ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hookline.checkpoint.atomic_files import write_atomic
from hookline.runs.config_hash import config_hash
from hookline.runs.environment import environment
from hookline.runs.git import git_facts
from hookline.runs.jsonable import plain
from hookline.runs.manifest import FORMAT, MANIFEST_VERSION, now

__all__ = ["Facts", "continued", "new_manifest", "write_manifest"]

_OF_PARTS = ("started", "ended", "status", "host", "pid", "pid_started", "pid_namespace")
_LONG = ("config", "hooks", "packages", "seed", "torch_seed")  # kept in a part where they changed


class Facts:
    """What whoever starts a run knows of it; None: as the run had it before.

    Args:
        config: The resolved configuration. What is not JSON stands there as its `repr`.
        seed: The seed.
        hooks: What to say about each hook, in order.
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
        self.device = device
        self.given: dict[str, Any] = {}
        if config is not None:
            self.given |= {"config": plain(config), "config_hash": config_hash(config)}
        if hooks is not None:
            self.given["hooks"] = plain(list(hooks))
        if self.given:
            self.given |= {"seed": plain(seed), "torch_seed": torch.initial_seed()}

    def part(self) -> dict[str, Any]:
        """Return all that is known of the part that starts now."""
        process = {"git": git_facts(), **environment(self.device)}
        return {"started": now(), "ended": None, "status": "training", **self.given, **process}


def new_manifest(run_id: str, facts: Facts) -> dict[str, Any]:
    """Return the manifest of a run that starts now."""
    part = facts.part()
    return {
        "format": FORMAT,
        "version": MANIFEST_VERSION,
        "run_id": run_id,
        "status": "training",
        "created": part["started"],
        "started": part["started"],
        "ended": None,
        "last_error": None,
        **_shared(part),
        "lost_records": 0,
        "parts": [_short(part)],
    }


def continued(folder: Path, manifest: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Return the manifest of a run that goes on now, with a new part."""
    part = facts.part()
    parts = [dict(earlier) for earlier in manifest.get("parts") or ()]
    if parts:
        changed = {n: manifest[n] for n in _LONG if n in manifest and n in part}
        parts[-1] |= {n: value for n, value in changed.items() if value != part[n]}
        if parts[-1].get("ended") is None:  # nobody was left to say so
            parts[-1] |= {"status": "lost", "ended": _last_write(folder)}
    going = {"status": "training", "ended": None, "last_error": None}
    return {**manifest, **going, **_shared(part), "parts": [*parts, _short(part)]}


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace a run's manifest atomically."""
    text = json.dumps(manifest, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_atomic(folder / "manifest.json", text)


def _shared(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in _OF_PARTS}


def _short(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in _LONG}


def _last_write(folder: Path) -> str | None:
    files = [folder / name for name in ("metrics.jsonl", "events.jsonl")]
    times = [file.stat().st_mtime for file in files if file.is_file()]
    return datetime.fromtimestamp(max(times), UTC).isoformat() if times else None
