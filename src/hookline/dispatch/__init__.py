"""Dispatch: match hooks with events, order, fire, toggle, isolate and account for them.

`binding` matches methods and parameters with events, `compiler` generates the source of an event's
dispatcher, `dispatcher` runs it, `order` places hooks, `failures` isolates them, `accounting`
measures their cost, `entry` is a registered hook, and `manager` brings these together.
"""

from hookline.dispatch.accounting import HookInfo, HookStatus, Summary
from hookline.dispatch.manager import HookManager, StateReport
from hookline.dispatch.runner import HookRunner
from hookline.dispatch.settings import HookLike, HookSettings, Registration, Schedule, every

__all__ = [
    "HookInfo",
    "HookLike",
    "HookManager",
    "HookRunner",
    "HookSettings",
    "HookStatus",
    "Registration",
    "Schedule",
    "StateReport",
    "Summary",
    "every",
]
