"""Names of hooks: built-ins, and class paths."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from hookline.errors import ConfigError, nearest
from hookline.hook import Hook

BUILT_INS: Mapping[str, str] = {
    "gradient_monitor": "hookline.hooks.monitoring.gradient_monitor.GradientMonitor",
    "optimizer_monitor": "hookline.hooks.monitoring.optimizer_monitor.OptimizerMonitor",
    "gradient_noise_scale": "hookline.hooks.monitoring.gradient_noise_scale.GradientNoiseScale",
    "attention_monitor": "hookline.hooks.monitoring.attention_monitor.AttentionMonitor",
    "outlier_monitor": "hookline.hooks.monitoring.outlier_monitor.OutlierMonitor",
    "logit_monitor": "hookline.hooks.monitoring.logit_monitor.LogitMonitor",
    "sharpness": "hookline.hooks.monitoring.sharpness.Sharpness",
    "loss_spike_detector": "hookline.hooks.monitoring.loss_spike_detector.LossSpikeDetector",
    "lr_monitor": "hookline.hooks.monitoring.lr_monitor.LRMonitor",
    "activation_stats": "hookline.hooks.monitoring.activation_stats.ActivationStats",
    "logging": "hookline.hooks.monitoring.logging_hook.LoggingHook",
    "console_log": "hookline.hooks.monitoring.console_log.ConsoleLogHook",
    "json_log": "hookline.hooks.monitoring.json_log.JSONLogHook",
    "early_stopping": "hookline.hooks.optimization.early_stopping.EarlyStopping",
    "ema": "hookline.hooks.optimization.ema.EMA",
    "time_limit": "hookline.hooks.optimization.time_limit.TimeLimit",
    "model_checkpoint": "hookline.hooks.checkpointing.model_checkpoint.ModelCheckpoint",
    "checkpoint": "hookline.hooks.checkpointing.checkpoint_hook.CheckpointHook",
    "upload": "hookline.hooks.checkpointing.upload.UploadHook",
    "lint": "hookline.hooks.lint.lint_hook.Lint",
    "debug": "hookline.hooks.debugging.debug_hook.DebugHook",
    "notification": "hookline.hooks.notification.notification_hook.NotificationHook",
    "heartbeat": "hookline.hooks.notification.heartbeat.Heartbeat",
    "identity": "hookline.updates.stateless.Identity",
    "scale": "hookline.updates.stateless.Scale",
    "mask": "hookline.updates.stateless.Mask",
    "clip_norm": "hookline.updates.stateless.ClipNorm",
    "clip_value": "hookline.updates.stateless.ClipValue",
    "centralize": "hookline.updates.stateless.Centralize",
    "noise": "hookline.updates.stateful.Noise",
    "ema_filter": "hookline.updates.stateful.EMAFilter",
    "skip_nonfinite": "hookline.updates.stateless.SkipNonfinite",
}
"""Hookline's own hooks: the name in a run, and the class path."""

PROBES: Mapping[str, str] = {
    "capture": "hookline.probes.capture.Capture",
    "monitor": "hookline.probes.monitor.Monitor",
    "debug_probe": "hookline.probes.debug_probe.DebugProbe",
    "edit": "hookline.probes.edit.Edit",
}
"""Hookline's own probes: the name in a run, and the class path."""

_OWN = {**BUILT_INS, **PROBES}


class KnownHook(NamedTuple):
    """A hook class that can be named in a configuration."""

    name: str
    path: str
    """The class path."""


def known_hooks() -> dict[str, KnownHook]:
    """Return every hook that has a name."""
    return {name: KnownHook(name, path) for name, path in _OWN.items()}


def find_hook(name: str) -> KnownHook:
    """Return the hook of a name or class path, without importing it."""
    if name in _OWN or "." in name:
        return KnownHook(name, _OWN.get(name, name))
    raise ConfigError(
        f"Unknown hook '{name}'.{nearest(name, _OWN)} `hookline hooks` lists all names. "
        f"Name a hook of your own with its module: `package.{name}`."
    )


def load_hook_class(name: str) -> type[Hook]:
    """Import and return the hook class of a name or class path."""
    found = find_hook(name)
    hook_class = load_class(found.path)
    if not (isinstance(hook_class, type) and issubclass(hook_class, Hook)):
        raise ConfigError(
            f"'{name}' is not a hook: {found.path} does not inherit from hookline.Hook."
        )
    return hook_class


def load_class(path: str) -> Any:
    """Import and return the class of a path such as `mypackage.hooks.MyHook`."""
    try:
        return load_object(path)
    except LookupError as error:
        raise ConfigError(f"'{path}': {error}") from error


def load_object(path: str) -> Any:
    """Import and return the class or function of a path, or a class's method, `pkg.Net.tiny`.

    Raises:
        LookupError: it does not exist, its module cannot be imported, or the path goes through a
            module that is imported there, `pkg.os.system`.
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise LookupError("It is not a class path, `package.module.Name`.")
    module, used = _import_longest(parts)
    found: Any = module
    for part in parts[used:]:
        if isinstance(found, ModuleType) and found is not module:
            name = found.__name__
            raise LookupError(
                f"'{path}' goes through the module '{name}', which is only imported there."
            )
        try:
            found = getattr(found, part)
        except Exception as error:
            name, known = getattr(found, "__name__", "it"), dir(found)
            raise LookupError(f"'{name}' has no '{part}'.{nearest(part, known)}") from error
    if callable(found):
        return found
    kind = "a module" if isinstance(found, ModuleType) else f"an instance of {type(found).__name__}"
    raise LookupError(f"It is {kind}; expected a class or a function.")


def _import_longest(parts: list[str]) -> tuple[ModuleType, int]:
    """Import as many parts of a path as are modules, except the last; return how many."""
    for used in range(max(len(parts) - 1, 1), 0, -1):
        name = ".".join(parts[:used])
        try:
            return import_module(name), used
        except (Exception, SystemExit) as error:  # whatever the module's own code raises
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                raise LookupError(
                    f"The module '{name}' could not be imported ({type(error).__name__}: {error})."
                ) from error
    raise LookupError(f"There is no module '{parts[0]}'.{nearest(parts[0], sorted(sys.modules))}")
