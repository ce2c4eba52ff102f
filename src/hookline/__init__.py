"""Hookline: one hook system for every PyTorch training loop.

    import hookline

    class Watch(hookline.Hook):
        def on_step_end(self, step, loss):
            print(step, loss)

    with hookline.attach(model, optimizer, hooks=[Watch()]):
        ...  # the loop as it was

Every public name can be imported from here. Names are imported on first use, so that
`import hookline` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline._version import __version__ as __version__
from hookline.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from hookline.config.registry import HookRegistry as HookRegistry
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
    from hookline.errors import ArgumentError as ArgumentError
    from hookline.errors import CheckpointError as CheckpointError
    from hookline.errors import CollectiveError as CollectiveError
    from hookline.errors import ConfigError as ConfigError
    from hookline.errors import HookConfigError as HookConfigError
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
    from hookline.errors import RandomNumberError as RandomNumberError
    from hookline.errors import RegistrationError as RegistrationError
    from hookline.errors import RunError as RunError
    from hookline.errors import SignatureError as SignatureError
    from hookline.errors import StopTraining as StopTraining
    from hookline.errors import TrainingError as TrainingError
    from hookline.errors import UnknownEventError as UnknownEventError
    from hookline.errors import UnknownHookError as UnknownHookError
    from hookline.errors import UnknownMetricError as UnknownMetricError
    from hookline.events import EVENTS as EVENTS
    from hookline.files.limits import file_limits as file_limits
    from hookline.hook import ForwardHook as ForwardHook
    from hookline.hook import Hook as Hook
    from hookline.hook import UpdateHook as UpdateHook
    from hookline.hooks.checkpointing.checkpoint_hook import CheckpointHook as CheckpointHook
    from hookline.hooks.checkpointing.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from hookline.hooks.checkpointing.upload import UploadHook as UploadHook
    from hookline.hooks.debugging.debug_hook import DebugHook as DebugHook
    from hookline.hooks.monitoring.activation_stats import ActivationStats as ActivationStats
    from hookline.hooks.monitoring.attention_monitor import AttentionMonitor as AttentionMonitor
    from hookline.hooks.monitoring.console_log import ConsoleLogHook as ConsoleLogHook
    from hookline.hooks.monitoring.gradient_monitor import GradientMonitor as GradientMonitor
    from hookline.hooks.monitoring.gradient_noise_scale import (
        GradientNoiseScale as GradientNoiseScale,
    )
    from hookline.hooks.monitoring.json_log import JSONLogHook as JSONLogHook
    from hookline.hooks.monitoring.logging_hook import LoggingHook as LoggingHook
    from hookline.hooks.monitoring.logit_monitor import LogitMonitor as LogitMonitor
    from hookline.hooks.monitoring.loss_spike_detector import LossSpikeDetector as LossSpikeDetector
    from hookline.hooks.monitoring.lr_monitor import LRMonitor as LRMonitor
    from hookline.hooks.monitoring.optimizer_monitor import OptimizerMonitor as OptimizerMonitor
    from hookline.hooks.monitoring.outlier_monitor import OutlierMonitor as OutlierMonitor
    from hookline.hooks.monitoring.runtime_profile import RuntimeProfile as RuntimeProfile
    from hookline.hooks.monitoring.sharpness import Sharpness as Sharpness
    from hookline.hooks.monitoring.torch_profiler import TorchProfiler as TorchProfiler
    from hookline.hooks.notification.heartbeat import Heartbeat as Heartbeat
    from hookline.hooks.notification.notification_hook import NotificationHook as NotificationHook
    from hookline.hooks.optimization.early_stopping import EarlyStopping as EarlyStopping
    from hookline.hooks.optimization.ema import EMA as EMA
    from hookline.hooks.optimization.time_limit import TimeLimit as TimeLimit
    from hookline.integrations.attach import attach as attach
    from hookline.integrations.bare_loop import LoadedCheckpoint as LoadedCheckpoint
    from hookline.integrations.bare_loop import Session as Session
    from hookline.integrations.scripts.attach_next import NextSession as NextSession
    from hookline.integrations.scripts.attach_next import attach_next as attach_next
    from hookline.probes.capture import probe as probe
    from hookline.probes.taps import tap as tap
    from hookline.report import Report as Report
    from hookline.report import make_report as make_report
    from hookline.runs import get_last_checkpoint as get_last_checkpoint
    from hookline.runs import open_run as open_run
    from hookline.tensors.full_tensor import full_tensor as full_tensor
    from hookline.trackers import TrackedRun as TrackedRun
    from hookline.trackers import TrackedValue as TrackedValue
    from hookline.trackers import Tracker as Tracker
    from hookline.trainer.trainer import Trainer as Trainer
    from hookline.trainer.trainer_kinds import AccelerateTrainer as AccelerateTrainer
    from hookline.trainer.trainer_kinds import get_trainer as get_trainer
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
    from hookline.verification.verifier import verify as verify

    TrainerHooks = Hook
    TrainingHook = Hook
    GenericTrainer = Trainer
    BaseTrainer = Trainer
    SimpleTrainer = Trainer

# A test compares these tables with the imports above, which type checkers and editors read.
_MODULES = {
    "config.registry": ("HookRegistry",),
    "config.trainer_config": ("HooksConfig", "TrainerConfig"),
    "context": ("LazyFloat", "Metrics", "StepContext"),
    "dispatch": (
        *("HookInfo", "HookManager", "HookRunner", "HookSettings"),
        *("Schedule", "StateReport", "Summary"),
    ),
    "errors": (
        *("ArgumentError", "CheckpointError", "CollectiveError", "ConfigError", "HookConfigError"),
        *("HookFailedError", "HookStateError", "HooklineError"),
        *("LoopError", "NameTakenError", "NotAHookError", "NotSuppliedError", "ObserverError"),
        *("OrderError", "ProbeError", "RandomNumberError", "RegistrationError", "RunError"),
        *("SignatureError", "StopTraining", "TrainingError", "UnknownEventError"),
        *("UnknownHookError", "UnknownMetricError"),
    ),
    "events": ("EVENTS",),
    "files.limits": ("file_limits",),
    "hook": ("ForwardHook", "Hook", "UpdateHook"),
    "hooks.checkpointing.checkpoint_hook": ("CheckpointHook",),
    "hooks.checkpointing.model_checkpoint": ("ModelCheckpoint",),
    "hooks.checkpointing.upload": ("UploadHook",),
    "hooks.debugging.debug_hook": ("DebugHook",),
    "hooks.monitoring.activation_stats": ("ActivationStats",),
    "hooks.monitoring.attention_monitor": ("AttentionMonitor",),
    "hooks.monitoring.console_log": ("ConsoleLogHook",),
    "hooks.monitoring.gradient_monitor": ("GradientMonitor",),
    "hooks.monitoring.gradient_noise_scale": ("GradientNoiseScale",),
    "hooks.monitoring.json_log": ("JSONLogHook",),
    "hooks.monitoring.logging_hook": ("LoggingHook",),
    "hooks.monitoring.logit_monitor": ("LogitMonitor",),
    "hooks.monitoring.loss_spike_detector": ("LossSpikeDetector",),
    "hooks.monitoring.lr_monitor": ("LRMonitor",),
    "hooks.monitoring.optimizer_monitor": ("OptimizerMonitor",),
    "hooks.monitoring.outlier_monitor": ("OutlierMonitor",),
    "hooks.monitoring.runtime_profile": ("RuntimeProfile",),
    "hooks.monitoring.sharpness": ("Sharpness",),
    "hooks.monitoring.torch_profiler": ("TorchProfiler",),
    "hooks.notification.heartbeat": ("Heartbeat",),
    "hooks.notification.notification_hook": ("NotificationHook",),
    "hooks.optimization.early_stopping": ("EarlyStopping",),
    "hooks.optimization.ema": ("EMA",),
    "hooks.optimization.time_limit": ("TimeLimit",),
    "integrations.attach": ("attach",),
    "integrations.bare_loop": ("LoadedCheckpoint", "Session"),
    "integrations.scripts.attach_next": ("NextSession", "attach_next"),
    "probes.capture": ("probe",),
    "probes.taps": ("tap",),
    "report": ("Report", "make_report"),
    "runs": ("get_last_checkpoint", "open_run"),
    "tensors.full_tensor": ("full_tensor",),
    "trackers": ("TrackedRun", "TrackedValue", "Tracker"),
    "trainer.trainer": ("Trainer",),
    "trainer.trainer_kinds": ("AccelerateTrainer", "get_trainer"),
    "updates": (
        *("AGC", "Centralize", "ClipNorm", "ClipValue", "EMAFilter", "Identity"),
        *("Mask", "Noise", "Scale", "SkipNonfinite"),
    ),
    "verification.verifier": ("verify",),
}
_ALIASES = {
    "TrainerHooks": "Hook",
    "TrainingHook": "Hook",
    "GenericTrainer": "Trainer",
    "BaseTrainer": "Trainer",
    "SimpleTrainer": "Trainer",
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "__version__",
    *_ALIASES,
    *(name for names in _MODULES.values() for name in names),
]

__getattr__, __dir__ = lazy_exports(
    __name__, _MODULES, _ALIASES, ("config_files", "probes", "updates")
)
