"""From names and class paths to hooks."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from hookline.errors import ConfigError, nearest
from hookline.hook import Hook
from hookline.options import check_options, options_of

__all__ = ["BUILT_INS", "load_class", "load_hook_class", "make_hook"]

BUILT_INS: Mapping[str, str] = {
    "gradient_monitor": "hookline.hooks.monitoring.gradients.GradientMonitor",
    "lr_monitor": "hookline.hooks.monitoring.learning_rate.LRMonitor",
    "activation_stats": "hookline.hooks.monitoring.activations.ActivationStats",
    "runtime_profile": "hookline.hooks.monitoring.profile.RuntimeProfile",
    "torch_profiler": "hookline.hooks.monitoring.torch_profiler.TorchProfiler",
    "logging": "hookline.hooks.monitoring.logging.LoggingHook",
    "console_log": "hookline.hooks.monitoring.console.ConsoleLogHook",
    "json_log": "hookline.hooks.monitoring.json_log.JSONLogHook",
    "early_stopping": "hookline.hooks.optimization.early_stopping.EarlyStopping",
    "ema": "hookline.hooks.optimization.ema.EMA",
    "time_limit": "hookline.hooks.optimization.time_limit.TimeLimit",
    "model_checkpoint": "hookline.hooks.checkpointing.model_checkpoint.ModelCheckpoint",
    "checkpoint": "hookline.hooks.checkpointing.checkpoint.CheckpointHook",
    "upload": "hookline.hooks.checkpointing.upload.UploadHook",
    "debug": "hookline.hooks.debugging.debug.DebugHook",
    "notification": "hookline.hooks.integration.notifications.NotificationHook",
    "heartbeat": "hookline.hooks.integration.heartbeat.Heartbeat",
    "identity": "hookline.updates.shaping.Identity",
    "scale": "hookline.updates.shaping.Scale",
    "mask": "hookline.updates.shaping.Mask",
    "clip_norm": "hookline.updates.shaping.ClipNorm",
    "clip_value": "hookline.updates.shaping.ClipValue",
    "agc": "hookline.updates.shaping.AGC",
    "centralize": "hookline.updates.shaping.Centralize",
    "noise": "hookline.updates.stateful.Noise",
    "ema_filter": "hookline.updates.stateful.EMAFilter",
    "skip_nonfinite": "hookline.updates.skipping.SkipNonfinite",
}
"""Hookline's own hooks: the name that each gets in a run, and where its class is."""


def load_class(path: str) -> Any:
    """Return the class of this path, such as `mypackage.hooks.MyHook`."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ConfigError(
            f"'{path}' is no class path: write it with its module, `package.{path}`."
            f"{nearest(path, BUILT_INS)}"
        )
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"'{path}': the module '{module_name}' could not be imported ({error})."
        ) from error
    if not hasattr(module, name):
        hint = nearest(name, dir(module))
        raise ConfigError(f"'{path}': the module '{module_name}' has no '{name}'.{hint}")
    return getattr(module, name)


def load_hook_class(name: str) -> type[Hook]:
    """Return the hook class of a built-in's name or a class path."""
    kind = load_class(BUILT_INS.get(name, name))
    if not (isinstance(kind, type) and issubclass(kind, Hook)):
        raise ConfigError(f"'{name}' is not a hook: it does not inherit from hookline.Hook.")
    return kind


def make_hook(name: str, options: Mapping[str, Any]) -> Hook:
    """Return a hook of this name or class path, made with these options."""
    kind: Any = load_hook_class(name)
    own = name in BUILT_INS
    resolved = check_options(kind, (), options, values=own)
    missing = [one for one in options_of(kind) if one not in resolved]
    if missing:
        text = options_of(kind)[missing[0]].text
        raise ConfigError(f"{kind.__name__} needs the option '{missing[0]}'. {text}".rstrip())
    try:
        hook: Hook = kind(**options)
    except TypeError as error:
        raise ConfigError(f"'{name}' cannot be made with {dict(options)}: {error}.") from error
    if not own and not hook.hookline_options:
        hook.hookline_options = resolved
    return hook
