"""A run that is not written to a folder: its record only goes to trackers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from hookline.runs.jsonl_file import JsonlFile
from hookline.runs.manifest import describe_part, new_manifest
from hookline.runs.metrics_log import MetricsLog
from hookline.runs.run import Kind, Run

__all__ = ["UnwrittenRun"]


class _NoFile:
    """Stands for the file of a metrics log that is not written."""

    lost = 0

    def append(self, lines: list[bytes]) -> None:
        """Drop lines."""


class UnwrittenRun(Run):
    """A run without a folder. Images are in a temporary folder until it is closed."""

    has_folder = False

    def __init__(self, run_id: str, parent: Mapping[str, Any] | None, **fields: Any) -> None:
        part = describe_part(**fields)
        super().__init__(Path(), new_manifest(run_id, part, parent))
        del self.path
        self.metrics_log = MetricsLog(cast(JsonlFile, _NoFile()))

    @cached_property
    def path(self) -> Path:  # type: ignore[override]
        """A temporary folder, made when the first image is logged."""
        return Path(tempfile.mkdtemp(prefix="hookline-"))

    def event(self, kind: str, /, **fields: Any) -> None:
        """Drop an event."""

    def update(self, **fields: Any) -> None:
        """Change fields of the manifest, in memory."""
        self.manifest.update(fields)

    def _convert(self, step: int, name: str, value: Any, kind: Kind) -> tuple[Any, Kind]:
        converted, kind = super()._convert(step, name, value, kind)
        if isinstance(converted, dict) and "path" in converted:
            converted["path"] = str(self.path / converted["path"])
        return converted, kind

    def close(self, status: str = "completed", error: BaseException | str | None = None) -> None:
        """End the run, and remove the temporary folder."""
        self.flush()
        if "path" in self.__dict__:
            shutil.rmtree(self.path, ignore_errors=True)
