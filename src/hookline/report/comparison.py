"""What differs between the runs of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hookline.printable import printable
from hookline.report.reading import RunData
from hookline.runs.diff import describe_sections
from hookline.runs.formatting import format_number

__all__ = ["compare_runs"]

_MAX_ROWS = 300  # of a section


def compare_runs(runs: Sequence[RunData]) -> dict[str, list[list[str]]]:
    """Return the rows that differ, by section: a name, and the value of each run."""
    described = [describe_sections(run.manifest) for run in runs]
    for sections, run in zip(described, runs, strict=True):
        sections["results"] = _results(run)
    return {
        section: rows
        for section in described[0]
        if (rows := _differences([sections[section] for sections in described]))
    }


def _differences(sides: list[dict[str, Any]]) -> list[list[str]]:
    names = dict.fromkeys(name for side in sides for name in side)
    found = {name: [side.get(name) for side in sides] for name in names}
    rows = [
        [printable(name, 200), *map(_shown, values)]
        for name, values in found.items()
        if len(set(map(repr, values))) > 1
    ]
    if len(rows) > _MAX_ROWS:
        rows[_MAX_ROWS:] = [[f"… and {len(rows) - _MAX_ROWS} more", *[""] * len(sides)]]
    return rows


def _shown(value: Any) -> str:
    return "–" if value is None else printable(format_number(value), 300)


def _results(run: RunData) -> dict[str, Any]:
    results: dict[str, Any] = {"steps": run.overview["steps"], "status": run.overview["status"]}
    for name, series in run.series.items():
        if name.startswith(("train/", "val/")):
            summary = series.summary(name)
            results[f"{name} (last)"] = summary.last
            results[f"{name} (best)"] = summary.best
    return results
