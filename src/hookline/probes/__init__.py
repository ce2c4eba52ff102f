"""Probes: what flows through a model, captured, measured, checked or edited.

The short form is `hookline.probe(model, "blocks.*.mlp")`. Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from hookline.probes.call import Call as Call
    from hookline.probes.capture import Calls as Calls
    from hookline.probes.capture import Capture as Capture
    from hookline.probes.capture import NotCapturedError as NotCapturedError
    from hookline.probes.capture import ProbeResults as ProbeResults
    from hookline.probes.debug_probe import Debug as Debug
    from hookline.probes.debug_probe import DebugProbe as DebugProbe
    from hookline.probes.debug_probe import Finding as Finding
    from hookline.probes.edit import Edit as Edit
    from hookline.probes.flow import Flow as Flow
    from hookline.probes.flow import gradient_flow as gradient_flow
    from hookline.probes.hook_manager import HookManager as HookManager
    from hookline.probes.hook_manager import Probes as Probes
    from hookline.probes.monitor import Monitor as Monitor
    from hookline.probes.probe import Probe as Probe
    from hookline.probes.store import CapturedState as CapturedState
    from hookline.probes.store import Counts as Counts
    from hookline.probes.store import Store as Store
    from hookline.probes.taps import tap as tap

_MODULES = {
    "call": ("Call",),
    "capture": ("Calls", "Capture", "NotCapturedError", "ProbeResults"),
    "debug_probe": ("Debug", "DebugProbe", "Finding"),
    "edit": ("Edit",),
    "flow": ("Flow", "gradient_flow"),
    "hook_manager": ("HookManager", "Probes"),
    "monitor": ("Monitor",),
    "probe": ("Probe",),
    "store": ("CapturedState", "Counts", "Store"),
    "taps": ("tap",),
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    *(name for names in _MODULES.values() for name in names)
]

__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
