"""Dispatch: from a hook's methods to calls in a training loop.

One idea per file: `binding` matches methods and parameters, `schedule` says when a hook is due,
`order` in which order hooks come, `compiler` writes the text of a dispatcher, `dispatcher` makes it
callable, `failures` keeps a failing hook from training, `accounting` knows what hooks cost,
`states` saves and loads theirs, `source` is where hand-fired events get their arguments, `entry`
is a hook as it is registered, `manager` the HookManager, `runner` the HookRunner, `holder`
what trainers and sessions pass on to it.
"""

from hookline.dispatch.accounting import HookInfo, Summary
from hookline.dispatch.hook_settings import HookSettings
from hookline.dispatch.hook_states import StateReport
from hookline.dispatch.hooks_mixin import HooksMixin
from hookline.dispatch.manager import HookManager
from hookline.dispatch.runner import HookRunner
from hookline.dispatch.schedule import Schedule

__all__ = [
    "HookInfo",
    "HookManager",
    "HookRunner",
    "HookSettings",
    "HooksMixin",
    "Schedule",
    "StateReport",
    "Summary",
]
