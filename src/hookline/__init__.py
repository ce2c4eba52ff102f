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

from hookline._version import __version__ as __version__
from hookline.lazy_exports import lazy_exports

# `make generate` writes __init__.pyi from these tables, for type checkers and editors.
_MODULES = {
    "config.registry": ("HookRegistry",),
    "config.trainer_config": ("HooksConfig", "TrainerConfig"),
    "context": ("LazyFloat", "Metrics", "StepContext"),
    "dispatch": (
        *("HookInfo", "HookManager", "HookRunner", "HookSettings"),
        *("Schedule", "StateReport", "Summary", "every"),
    ),
    "errors": (
        *("ArgumentError", "CheckpointError", "CollectiveError", "ConfigError", "HookConfigError"),
        *("HookFailedError", "HookStateError", "HooklineError"),
        *("LoopError", "NameTakenError", "NotAHookError", "NotProvidedError", "ObserverError"),
        *("OrderError", "ProbeError", "RandomNumberError", "RegistrationError", "RunError"),
        *("SignatureError", "StopTraining", "TrainingError", "UnknownEventError"),
        *("UnknownHookError", "UnknownMetricError"),
    ),
    "events": ("EVENTS",),
    "files": ("file_limits",),
    "hook": ("ForwardHook", "Hook", "UpdateHook"),
    "hooks.checkpointing.checkpoint_hook": ("CheckpointHook",),
    "hooks.checkpointing.model_checkpoint": ("ModelCheckpoint",),
    "hooks.checkpointing.upload": ("UploadHook",),
    "hooks.debugging.debug_hook": ("DebugHook",),
    "hooks.lint.finding": ("Finding",),
    "hooks.lint.lint_hook": ("Lint",),
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
    "hooks.monitoring.sharpness": ("Sharpness",),
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
    "trainer.factory": ("AccelerateTrainer", "get_trainer"),
    "updates": (
        *("Centralize", "ClipNorm", "ClipValue", "EMAFilter", "Identity"),
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
    "NotSuppliedError": "NotProvidedError",
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "__version__",
    *_ALIASES,
    *(name for names in _MODULES.values() for name in names),
]

__getattr__, __dir__ = lazy_exports(
    __name__, _MODULES, _ALIASES, ("config_files", "probes", "updates")
)
