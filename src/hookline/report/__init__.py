"""A run as one HTML page that works without a network: `hookline report`."""

from __future__ import annotations

from hookline.report.document import Report, make_report

__all__ = ["Report", "make_report"]
