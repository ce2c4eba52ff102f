"""Verification of a training run: exact resume, hooks that only observe, reproducible weights."""

from hookline.verification.report import Check, Culprit, Report
from hookline.verification.verifier import verify

__all__ = ["Check", "Culprit", "Report", "verify"]
