"""Probes: what flows through a model, captured, measured, checked or edited.

The short form is `hookline.probe(model, "blocks.*.mlp")`. Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.lazy import lazily

if TYPE_CHECKING:
    from hookline.probes.attaching import Call
    from hookline.probes.capture import Calls, Capture, NotCapturedError
    from hookline.probes.debug import Debug, DebugProbe, Finding
    from hookline.probes.edit import Edit
    from hookline.probes.flow import Flow, GradientFlow, gradient_flow
    from hookline.probes.manager import HookManager, ProbeInfo, Probes
    from hookline.probes.monitor import Monitor
    from hookline.probes.probe import Probe
    from hookline.probes.short import Seen
    from hookline.probes.state import CapturedState
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
    "Probes",
    "Seen",
    "Store",
    "StoreFullError",
    "gradient_flow",
    "tap",
]

__getattr__ = lazily(
    __name__,
    {
        "attaching": ("Call",),
        "capture": ("Calls", "Capture", "NotCapturedError"),
        "debug": ("Debug", "DebugProbe", "Finding"),
        "edit": ("Edit",),
        "flow": ("Flow", "GradientFlow", "gradient_flow"),
        "manager": ("HookManager", "ProbeInfo", "Probes"),
        "monitor": ("Monitor",),
        "probe": ("Probe",),
        "short": ("Seen",),
        "state": ("CapturedState",),
        "store": ("Counts", "Store", "StoreFullError"),
        "taps": ("tap",),
    },
)
