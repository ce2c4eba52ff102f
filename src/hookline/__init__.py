"""Hookline: one hook system for every PyTorch training loop.

    import hookline

    class Watch(hookline.Hook):
        def on_step_end(self, step, loss):
            print(step, loss)

    with hookline.attach(model, optimizer, hooks=[Watch()]):
        ...  # the loop as it was

Every public name is here. They are loaded when first used, so importing this costs next to
nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hookline._version import __version__ as __version__

if TYPE_CHECKING:
    from hookline.context import LazyFloat as LazyFloat
    from hookline.context import Metrics as Metrics
    from hookline.context import StepContext as StepContext
    from hookline.dispatch import HookInfo as HookInfo
    from hookline.dispatch import HookManager as HookManager
    from hookline.dispatch import HookRunner as HookRunner
    from hookline.dispatch import HookSettings as HookSettings
    from hookline.dispatch import Schedule as Schedule
    from hookline.dispatch import StateReport as StateReport
    from hookline.dispatch import Summary as Summary
    from hookline.errors import HookFailedError as HookFailedError
    from hookline.errors import HooklineError as HooklineError
    from hookline.errors import HookStateError as HookStateError
    from hookline.errors import LoopError as LoopError
    from hookline.errors import NameTakenError as NameTakenError
    from hookline.errors import NotAHookError as NotAHookError
    from hookline.errors import NotSuppliedError as NotSuppliedError
    from hookline.errors import OrderError as OrderError
    from hookline.errors import RegistrationError as RegistrationError
    from hookline.errors import SignatureError as SignatureError
    from hookline.errors import UnknownEventError as UnknownEventError
    from hookline.errors import UnknownHookError as UnknownHookError
    from hookline.events import EVENTS as EVENTS
    from hookline.hook import Hook as Hook
    from hookline.hosts.raw import Session as Session
    from hookline.hosts.raw import attach as attach

    TrainerHooks = Hook
    TrainingHook = Hook

_WHERE = {
    "hookline.context": ("LazyFloat", "Metrics", "StepContext"),
    "hookline.dispatch": (
        "HookInfo",
        "HookManager",
        "HookRunner",
        "HookSettings",
        "Schedule",
        "StateReport",
        "Summary",
    ),
    "hookline.errors": (
        "HookFailedError",
        "HookStateError",
        "HooklineError",
        "LoopError",
        "NameTakenError",
        "NotAHookError",
        "NotSuppliedError",
        "OrderError",
        "RegistrationError",
        "SignatureError",
        "UnknownEventError",
        "UnknownHookError",
    ),
    "hookline.events": ("EVENTS",),
    "hookline.hook": ("Hook",),
    "hookline.hosts.raw": ("Session", "attach"),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}
_SAME = {"TrainerHooks": "Hook", "TrainingHook": "Hook"}  # the same object under another name

__all__ = sorted([*_MODULE, *_SAME, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    real = _SAME.get(name, name)
    if real not in _MODULE:
        raise AttributeError(f"module 'hookline' has no attribute {name!r}")
    value = getattr(import_module(_MODULE[real]), real)
    globals()[name] = value  # the next look-up is an ordinary one
    return value


def __dir__() -> list[str]:
    return __all__
