"""The report at the end of a run: `report.html` in the run's folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

__all__ = ["write_report_at_end"]

log = logging.getLogger("hookline")

_STATUSES = ("completed", "stopped")


def write_report_at_end(run: Any, status: str, *, wanted: bool = True) -> Path | None:
    """Write the report of a run that has ended, and return its file; None if there is none.

    There is none unless the run has completed or was stopped, if plotly is not installed, if
    `wanted` is false, or if the environment variable `HOOKLINE_REPORT` is 0. An error is logged
    and not raised: the run itself is complete.
    """
    is_off = os.environ.get("HOOKLINE_REPORT", "").strip().lower() in ("0", "false", "off", "no")
    path = getattr(run, "path", None)
    if not wanted or is_off or path is None or status not in _STATUSES:
        return None
    from importlib.util import find_spec

    if find_spec("plotly") is None:
        return None
    try:
        from hookline.report.report import make_report
        from hookline.runs.run_reader import OpenedRun

        return make_report(OpenedRun(Path(path))).write(Path(path) / "report.html")
    except Exception as error:  # the run is complete, and matters more
        log.warning("The report of %s could not be made: %s", path, error, exc_info=True)
        return None
