"""Probes: what flows through a model, captured, measured, checked or edited.

The short form is `hookline.probe(model, "blocks.*.mlp")`. Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from hookline.probes.call import Call
    from hookline.probes.capture import Calls, Capture, NotCapturedError, ProbeResults
    from hookline.probes.captured_state import CapturedState
    from hookline.probes.debug_probe import Debug, DebugProbe, Finding
    from hookline.probes.edit import Edit
    from hookline.probes.flow import Flow, GradientFlow, gradient_flow
    from hookline.probes.hook_manager import HookManager, ProbeInfo, Probes
    from hookline.probes.monitor import Monitor
    from hookline.probes.probe import Probe
    from hookline.probes.store import Counts, Store, StoreFullError
    from hookline.probes.taps import tap

__all__ = [
    "Call",
    "Calls",
    "Capture",
    "CapturedState",
    "Counts",
    "Debug",
    "DebugProbe",
    "Edit",
    "Finding",
    "Flow",
    "GradientFlow",
    "HookManager",
    "Monitor",
    "NotCapturedError",
    "Probe",
    "ProbeInfo",
    "ProbeResults",
    "Probes",
    "Store",
    "StoreFullError",
    "gradient_flow",
    "tap",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "call": ("Call",),
        "capture": ("Calls", "Capture", "NotCapturedError", "ProbeResults"),
        "debug_probe": ("Debug", "DebugProbe", "Finding"),
        "edit": ("Edit",),
        "flow": ("Flow", "GradientFlow", "gradient_flow"),
        "hook_manager": ("HookManager", "ProbeInfo", "Probes"),
        "monitor": ("Monitor",),
        "probe": ("Probe",),
        "captured_state": ("CapturedState",),
        "store": ("Counts", "Store", "StoreFullError"),
        "taps": ("tap",),
    },
)
