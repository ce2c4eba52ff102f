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
    from hookline.config import HookRegistry as HookRegistry
    from hookline.config.trainer_config import HooksConfig as HooksConfig
    from hookline.config.trainer_config import TrainerConfig as TrainerConfig
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
    from hookline.errors import CheckpointError as CheckpointError
    from hookline.errors import ConfigError as ConfigError
    from hookline.errors import HookFailedError as HookFailedError
    from hookline.errors import HooklineError as HooklineError
    from hookline.errors import HookStateError as HookStateError
    from hookline.errors import LoopError as LoopError
    from hookline.errors import NameTakenError as NameTakenError
    from hookline.errors import NotAHookError as NotAHookError
    from hookline.errors import NotSuppliedError as NotSuppliedError
    from hookline.errors import ObserverError as ObserverError
    from hookline.errors import OrderError as OrderError
    from hookline.errors import ProbeError as ProbeError
    from hookline.errors import RegistrationError as RegistrationError
    from hookline.errors import RunError as RunError
    from hookline.errors import SignatureError as SignatureError
    from hookline.errors import TrainingError as TrainingError
    from hookline.errors import UnknownEventError as UnknownEventError
    from hookline.errors import UnknownHookError as UnknownHookError
    from hookline.events import EVENTS as EVENTS
    from hookline.hook import ForwardHook as ForwardHook
    from hookline.hook import Hook as Hook
    from hookline.hook import UpdateHook as UpdateHook
    from hookline.hooks.checkpointing.checkpoint_hook import CheckpointHook as CheckpointHook
    from hookline.hooks.checkpointing.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from hookline.hooks.checkpointing.upload import UploadHook as UploadHook
    from hookline.hooks.debugging.debug_hook import DebugHook as DebugHook
    from hookline.hooks.monitoring.activation_stats import ActivationStats as ActivationStats
    from hookline.hooks.monitoring.console_log import ConsoleLogHook as ConsoleLogHook
    from hookline.hooks.monitoring.gradient_monitor import GradientMonitor as GradientMonitor
    from hookline.hooks.monitoring.json_log import JSONLogHook as JSONLogHook
    from hookline.hooks.monitoring.logging_hook import LoggingHook as LoggingHook
    from hookline.hooks.monitoring.lr_monitor import LRMonitor as LRMonitor
    from hookline.hooks.monitoring.runtime_profile import RuntimeProfile as RuntimeProfile
    from hookline.hooks.monitoring.torch_profiler import TorchProfiler as TorchProfiler
    from hookline.hooks.notification.heartbeat import Heartbeat as Heartbeat
    from hookline.hooks.notification.notification_hook import NotificationHook as NotificationHook
    from hookline.hooks.optimization.early_stopping import EarlyStopping as EarlyStopping
    from hookline.hooks.optimization.ema import EMA as EMA
    from hookline.hooks.optimization.time_limit import TimeLimit as TimeLimit
    from hookline.integrations.bare_loop import Session as Session
    from hookline.integrations.bare_loop import attach as attach
    from hookline.probes.probe_context import probe as probe
    from hookline.probes.taps import tap as tap
    from hookline.runs import open_run as open_run
    from hookline.trainer.trainer import Trainer as Trainer
    from hookline.trainer.trainer import get_trainer as get_trainer
    from hookline.updates import AGC as AGC
    from hookline.updates import Centralize as Centralize
    from hookline.updates import ClipNorm as ClipNorm
    from hookline.updates import ClipValue as ClipValue
    from hookline.updates import EMAFilter as EMAFilter
    from hookline.updates import Identity as Identity
    from hookline.updates import Mask as Mask
    from hookline.updates import Noise as Noise
    from hookline.updates import Scale as Scale
    from hookline.updates import SkipNonfinite as SkipNonfinite

    TrainerHooks = Hook
    TrainingHook = Hook
    GenericTrainer = Trainer
    BaseTrainer = Trainer
    SimpleTrainer = Trainer

_WHERE = {
    "hookline.config.trainer_config": ("HooksConfig", "TrainerConfig"),
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
        "CheckpointError",
        "ConfigError",
        "HookFailedError",
        "HookStateError",
        "HooklineError",
        "LoopError",
        "NameTakenError",
        "NotAHookError",
        "NotSuppliedError",
        "ObserverError",
        "ProbeError",
        "OrderError",
        "RegistrationError",
        "RunError",
        "SignatureError",
        "TrainingError",
        "UnknownEventError",
        "UnknownHookError",
    ),
    "hookline.events": ("EVENTS",),
    "hookline.hook": ("ForwardHook", "Hook", "UpdateHook"),
    "hookline.hooks.checkpointing.checkpoint_hook": ("CheckpointHook",),
    "hookline.hooks.checkpointing.model_checkpoint": ("ModelCheckpoint",),
    "hookline.hooks.checkpointing.upload": ("UploadHook",),
    "hookline.hooks.debugging.debug_hook": ("DebugHook",),
    "hookline.hooks.notification.heartbeat": ("Heartbeat",),
    "hookline.hooks.notification.notification_hook": ("NotificationHook",),
    "hookline.hooks.monitoring.console_log": ("ConsoleLogHook",),
    "hookline.hooks.monitoring.gradient_monitor": ("GradientMonitor",),
    "hookline.hooks.monitoring.json_log": ("JSONLogHook",),
    "hookline.hooks.monitoring.lr_monitor": ("LRMonitor",),
    "hookline.hooks.monitoring.logging_hook": ("LoggingHook",),
    "hookline.hooks.monitoring.runtime_profile": ("RuntimeProfile",),
    "hookline.hooks.monitoring.torch_profiler": ("TorchProfiler",),
    "hookline.hooks.optimization.early_stopping": ("EarlyStopping",),
    "hookline.hooks.optimization.ema": ("EMA",),
    "hookline.hooks.optimization.time_limit": ("TimeLimit",),
    "hookline.integrations.bare_loop": ("Session", "attach"),
    "hookline.probes.probe_context": ("probe",),
    "hookline.probes.taps": ("tap",),
    "hookline.config": ("HookRegistry",),
    "hookline.runs": ("open_run",),
    "hookline.trainer.trainer": ("Trainer", "get_trainer"),
    "hookline.updates": (
        "AGC",
        "Centralize",
        "ClipNorm",
        "ClipValue",
        "EMAFilter",
        "Identity",
        "Mask",
        "Noise",
        "Scale",
        "SkipNonfinite",
    ),
    "hookline.hooks.monitoring.activation_stats": ("ActivationStats",),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}
_SAME = {  # the same object under another name
    "TrainerHooks": "Hook",
    "TrainingHook": "Hook",
    "GenericTrainer": "Trainer",
    "BaseTrainer": "Trainer",
    "SimpleTrainer": "Trainer",
}

__all__ = sorted([*_MODULE, *_SAME, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in ("probes", "updates"):  # folders with public names of their own
        return import_module(f"hookline.{name}")
    real = _SAME.get(name, name)
    if real not in _MODULE:
        raise AttributeError(f"module 'hookline' has no attribute {name!r}")
    value = getattr(import_module(_MODULE[real]), real)
    globals()[name] = value  # the next look-up is an ordinary one
    return value


def __dir__() -> list[str]:
    return __all__
