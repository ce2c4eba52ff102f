"""Verification of a training run: exact resume, hooks that only observe, reproducible weights."""

from hookline.verification.verifier import Check, Culprit, Report, verify

__all__ = ["Check", "Culprit", "Report", "verify"]
