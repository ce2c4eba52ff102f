"""The record of a run: a folder with a manifest, metrics, events and checkpoints."""

from __future__ import annotations

from hookline.errors import RunError
from hookline.runs.journal import read_records
from hookline.runs.run import Run

__all__ = ["Run", "RunError", "read_records"]
