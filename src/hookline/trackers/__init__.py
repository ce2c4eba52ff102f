"""Trackers: experiment trackers that a run is also written to, in the background."""

from __future__ import annotations

from hookline.trackers.protocol import TrackedRun, TrackedValue, Tracker

__all__ = ["TrackedRun", "TrackedValue", "Tracker"]
