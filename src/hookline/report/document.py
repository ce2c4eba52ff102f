"""Report: the page and the facts of one or several runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

from hookline.arguments import check_path
from hookline.checkpoint.atomic_files import write_atomic
from hookline.errors import RunError
from hookline.report.facts import collect_facts, shorten
from hookline.report.page import make_page, read_plotly
from hookline.report.page_data import encode_run, share_buckets
from hookline.report.run_data import RunData, read_run
from hookline.runs.diff import describe_results, describe_sections
from hookline.runs.formatting import format_number
from hookline.runs.reader import OpenedRun, open_run

log = logging.getLogger("hookline")

_MAX_RUNS = 12
_MAX_ROWS = 300  # of a section of differences


class Report:
    """The report of one or several runs.

    Attributes:
        html: The page: one file that needs no network.
        facts: The main facts, as JSON: `runs`, and `differences` between several runs.
    """

    def __init__(self, html: str, facts: dict[str, Any]) -> None:
        self.html = html
        self.facts = facts

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file and return its path. It exists completely or not at all.

        Raises:
            RunError: The file cannot be written, or it is a device, a FIFO or a folder.
        """
        file = Path(check_path("report.write(path)", path, "a file"))
        try:
            if file.exists() and not file.is_file():  # which would be replaced
                raise RunError(f"{file} is not a regular file; expected the name of a file.")
            write_atomic(file.resolve(), self.html, durable=False)
        except OSError as error:
            raise RunError(f"The report {file} cannot be written: {error}.") from error
        return file

    def __repr__(self) -> str:
        ids = ", ".join(str(run["id"]) for run in self.facts["runs"])
        return f"<report of {ids}: {len(self.html) / 1e6:.1f} MB>"


def make_report(
    *runs: str | os.PathLike[str] | OpenedRun,
    folder: str | os.PathLike[str] = "runs",
) -> Report:
    """Read runs, whatever state they are in, and return their report.

        make_report("runs/20261115-210655-3f9c7b").write("report.html")

    Args:
        runs: Runs from `open_run`, their folders or ids.
        folder: The folder of all runs, where an id is looked up.

    Raises:
        RunError: No run matches, or plotly is not installed.
    """
    if not 1 <= len(runs) <= _MAX_RUNS:
        raise RunError(f"A report shows 1 to {_MAX_RUNS} runs, not {len(runs)}.")
    plotly = read_plotly()  # before reading, which may take a minute
    opened = [one if isinstance(one, OpenedRun) else open_run(one, runs=folder) for one in runs]
    data = [read_run(run) for run in opened]
    found = [collect_facts(one) for one in data]
    differences = _compare_runs(data) if len(data) > 1 else {}
    share_buckets(data)
    shown: list[dict[str, Any]] = []
    for one, facts in zip(data, found, strict=True):
        media, left_out = one.media.encode(one.run.path, 1 / len(data))
        facts["left_out"] = [*one.left_out, *left_out]
        label = _label(facts, [run["label"] for run in shown])
        shown.append(encode_run(one, facts, label, media))
    encoded = {"runs": shown, "differences": differences}
    return Report(make_page(encoded, plotly), {"runs": found, "differences": differences})


def _label(facts: Mapping[str, Any], taken: list[str]) -> str:
    """Return what a run is called in the page: its name, with more if that is taken."""
    name = shorten(facts["name"] or facts["id"], 200)
    more = (f"{name} ({shorten(facts[key], 300)})" for key in ("id", "path"))
    labels = chain([name], more, (f"{name} ({i})" for i in count(2)))
    return next(label for label in labels if label not in taken)


def _compare_runs(runs: Sequence[RunData]) -> dict[str, list[list[str]]]:
    """Return the rows that differ, by section: a name, and the value of each run."""
    described = [describe_sections(run.manifest) for run in runs]
    for sections, run in zip(described, runs, strict=True):
        summaries = {name: series.summary(name) for name, series in run.series.items()}
        sections["results"] = describe_results(run.overview, summaries)
    return {
        section: rows
        for section in described[0]
        if (rows := _differences([sections[section] for sections in described]))
    }


def _differences(sides: list[dict[str, Any]]) -> list[list[str]]:
    names = dict.fromkeys(name for side in sides for name in side)
    found = {name: [side.get(name) for side in sides] for name in names}
    rows = [
        [shorten(name, 200), *map(_shown, values)]
        for name, values in found.items()
        if len(set(map(repr, values))) > 1
    ]
    if len(rows) > _MAX_ROWS:
        rows[_MAX_ROWS:] = [[f"… and {len(rows) - _MAX_ROWS} more", *[""] * len(sides)]]
    return rows


def _shown(value: Any) -> str:
    return "–" if value is None else shorten(format_number(value), 300)


def write_report_at_end(run: Any, status: str, *, wanted: bool = True) -> Path | None:
    """Write the report of a run that has ended, and return its file; None if there is none.

    There is none unless the run has completed or was stopped, if plotly is not installed, if
    `wanted` is false, or if the environment variable `HOOKLINE_REPORT` is 0. An error is logged
    and not raised: the run itself is complete.
    """
    is_off = os.environ.get("HOOKLINE_REPORT", "").strip().lower() in ("0", "false", "off", "no")
    path = getattr(run, "path", None)
    if not wanted or is_off or path is None or status not in ("completed", "stopped"):
        return None
    if find_spec("plotly") is None:
        return None
    try:
        return make_report(OpenedRun(Path(path))).write(Path(path) / "report.html")
    except Exception as error:  # the run is complete, and matters more
        log.warning("The report of %s could not be made: %s", path, error, exc_info=True)
        return None
