"""What names stand for: built-ins, hooks of installed packages, class paths, short class names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hookline.builtin import BuiltIn
from hookline.config.entry_points import PackagedHook, packaged_hooks
from hookline.errors import ConfigError, HooklineError, listed, nearest
from hookline.hook import Hook
from hookline.options import check_options, options_of

__all__ = [
    "BUILT_INS",
    "PROBES",
    "Known",
    "known_hooks",
    "load_class",
    "load_hook_class",
    "make_from",
    "make_hook",
    "where_is",
]

log = logging.getLogger("hookline")

BUILT_INS: Mapping[str, str] = {
    "gradient_monitor": "hookline.hooks.monitoring.gradient_monitor.GradientMonitor",
    "lr_monitor": "hookline.hooks.monitoring.lr_monitor.LRMonitor",
    "activation_stats": "hookline.hooks.monitoring.activation_stats.ActivationStats",
    "runtime_profile": "hookline.hooks.monitoring.runtime_profile.RuntimeProfile",
    "torch_profiler": "hookline.hooks.monitoring.torch_profiler.TorchProfiler",
    "logging": "hookline.hooks.monitoring.logging_hook.LoggingHook",
    "console_log": "hookline.hooks.monitoring.console_log.ConsoleLogHook",
    "json_log": "hookline.hooks.monitoring.json_log.JSONLogHook",
    "early_stopping": "hookline.hooks.optimization.early_stopping.EarlyStopping",
    "ema": "hookline.hooks.optimization.ema.EMA",
    "time_limit": "hookline.hooks.optimization.time_limit.TimeLimit",
    "model_checkpoint": "hookline.hooks.checkpointing.model_checkpoint.ModelCheckpoint",
    "checkpoint": "hookline.hooks.checkpointing.checkpoint_hook.CheckpointHook",
    "upload": "hookline.hooks.checkpointing.upload.UploadHook",
    "debug": "hookline.hooks.debugging.debug_hook.DebugHook",
    "notification": "hookline.hooks.notification.notification_hook.NotificationHook",
    "heartbeat": "hookline.hooks.notification.heartbeat.Heartbeat",
    "identity": "hookline.updates.stateless.Identity",
    "scale": "hookline.updates.stateless.Scale",
    "mask": "hookline.updates.stateless.Mask",
    "clip_norm": "hookline.updates.stateless.ClipNorm",
    "clip_value": "hookline.updates.stateless.ClipValue",
    "agc": "hookline.updates.stateless.AGC",
    "centralize": "hookline.updates.stateless.Centralize",
    "noise": "hookline.updates.stateful.Noise",
    "ema_filter": "hookline.updates.stateful.EMAFilter",
    "skip_nonfinite": "hookline.updates.stateless.SkipNonfinite",
}
"""Hookline's own hooks: the name that each gets in a run, and where its class is."""

PROBES: Mapping[str, str] = {
    "capture": "hookline.probes.capture.Capture",
    "monitor": "hookline.probes.monitor.Monitor",
    "debug_probe": "hookline.probes.debug_probe.DebugProbe",
    "gradient_flow": "hookline.probes.flow.GradientFlow",
    "edit": "hookline.probes.edit.Edit",
}
"""Hookline's own probes, likewise."""

_OURS = "hookline"


@dataclass(frozen=True)
class Known:
    """A hook that has a name."""

    name: str
    path: str
    """Where its class is."""

    package: str
    """Who brings it: `hookline`, or the name of an installed package."""

    @property
    def class_name(self) -> str:
        """The class's own name."""
        return self.path.rpartition(".")[2]


def known_hooks() -> dict[str, Known]:
    """Return every hook that has a name, without importing any.

    Where a package's hook has a name that is taken, it has its full name here, `package:name`; a
    built-in keeps its name, and of several packages none has it.
    """
    own = {**BUILT_INS, **PROBES}
    known = {name: Known(name, path, _OURS) for name, path in own.items()}
    packaged = packaged_hooks()
    for one in packaged:
        shared = one.name in own or len(_of_name(one.name, packaged)) > 1
        name = one.full_name if shared else one.name
        known[name] = Known(name, one.path, one.package)
    return known


def _of_name(name: str, packaged: Iterable[PackagedHook]) -> list[PackagedHook]:
    return [one for one in packaged if one.name == name]


def where_is(name: str) -> Known:
    """Return what a name stands for, without importing it; a class path stands for itself.

    Raises:
        ConfigError: it is neither, or it stands for several.
    """
    packaged = packaged_hooks()
    rivals = _of_name(name, packaged)
    own = {**BUILT_INS, **PROBES}
    if name in own:
        if rivals:
            log.warning(
                "'%s' is Hookline's own; that of the package '%s' is '%s'.",
                name,
                rivals[0].package,
                rivals[0].full_name,
            )
        return Known(name, own[name], _OURS)
    if len(rivals) > 1:
        raise ConfigError(
            f"'{name}' is brought by several packages. Say which: "
            f"{listed(one.full_name for one in rivals)}."
        )
    for one in packaged:
        if name in (one.name, one.full_name):
            return Known(name, one.path, one.package)
    if "." in name:
        return Known(name, name, name.partition(".")[0])
    return _of_class_name(name)


def _of_class_name(name: str) -> Known:
    known = known_hooks()
    same = [one for one in known.values() if one.class_name == name]
    if len(same) == 1:
        return same[0]
    if same:
        raise ConfigError(
            f"'{name}' is the class of several hooks. Say which: "
            f"{listed(one.name for one in same)}."
        )
    names = [*known, *(one.class_name for one in known.values())]
    raise ConfigError(
        f"'{name}' is no class path, and no hook has this name.{nearest(name, names)} "
        f"`hookline hooks` lists those there are; a hook of your own is named with its module, "
        f"`package.{name}`."
    )


def load_class(path: str) -> Any:
    """Return the class of this path, such as `mypackage.hooks.MyHook`."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"'{path}' is no class path: write it with its module, `package.{path}`.")
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever the module's own code raises
        raise ConfigError(
            f"'{path}': the module '{module_name}' could not be imported "
            f"({type(error).__name__}: {error})."
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        hint = nearest(name, dir(module))
        raise ConfigError(f"'{path}': the module '{module_name}' has no '{name}'.{hint}") from error


def load_hook_class(name: str) -> type[Hook]:
    """Return the hook class of a name or a class path."""
    found = where_is(name)
    kind = load_class(found.path)
    if not (isinstance(kind, type) and issubclass(kind, Hook)):
        whose = "" if found.package in (_OURS, name.partition(".")[0]) else f" of {found.package}"
        raise ConfigError(f"'{name}'{whose} is not a hook: it does not inherit from hookline.Hook.")
    return kind


def make_hook(name: str, options: Mapping[str, Any]) -> Hook:
    """Return a hook of this name or class path, made with these options."""
    return make_from(load_hook_class(name), name, options)


def make_from(kind: Any, name: str, options: Mapping[str, Any]) -> Hook:
    """Return a hook of this class; `name` is what the configuration calls it."""
    own = issubclass(kind, BuiltIn)
    resolved = check_options(kind, (), options, values=own)
    missing = [one for one in options_of(kind) if one not in resolved]
    if missing:
        text = options_of(kind)[missing[0]].text
        raise ConfigError(f"{kind.__name__} needs the option '{missing[0]}'. {text}".rstrip())
    try:
        hook: Hook = kind(**options)
    except HooklineError:
        raise
    except Exception as error:  # whatever the class's own code raises
        raise ConfigError(
            f"'{name}' cannot be made with {dict(options)} ({type(error).__name__}: {error})."
        ) from error
    if not own and not hook.hookline_options:
        hook.hookline_options = resolved
    return hook
