"""Probes: what flows through a model, captured, measured, checked or edited.

The short form is `hookline.probe(model, "blocks.*.mlp")`. Names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_WHERE = {
    "Call": "hookline.probes.attaching",
    "Calls": "hookline.probes.capture",
    "Capture": "hookline.probes.capture",
    "CapturedState": "hookline.probes.state",
    "Counts": "hookline.probes.store",
    "Debug": "hookline.probes.debug",
    "DebugProbe": "hookline.probes.debug",
    "Edit": "hookline.probes.edit",
    "Finding": "hookline.probes.debug",
    "Flow": "hookline.probes.flow",
    "GradientFlow": "hookline.probes.flow",
    "HookManager": "hookline.probes.manager",
    "Monitor": "hookline.probes.monitor",
    "NotCapturedError": "hookline.probes.capture",
    "Probe": "hookline.probes.probe",
    "ProbeInfo": "hookline.probes.manager",
    "Probes": "hookline.probes.manager",
    "Seen": "hookline.probes.short",
    "Store": "hookline.probes.store",
    "StoreFullError": "hookline.probes.store",
    "gradient_flow": "hookline.probes.flow",
    "tap": "hookline.probes.taps",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hookline.probes' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
