"""Configuration objects, the names of hooks, and the registry that creates hooks by name.

`trainer_config` has the configuration of a trainer, `hook_names` and `entry_points` find the class
of a name, `hook_items` reads the hooks of a configuration, `registry` is the `HookRegistry`.
"""

from hookline.config.hook_items import SECTIONS
from hookline.config.hook_names import (
    BUILT_INS,
    PROBES,
    KnownHook,
    find_hook,
    known_hooks,
    load_class,
    load_hook_class,
    make_hook,
)
from hookline.config.registry import HookRegistry

__all__ = [
    "BUILT_INS",
    "PROBES",
    "SECTIONS",
    "HookRegistry",
    "KnownHook",
    "find_hook",
    "known_hooks",
    "load_class",
    "load_hook_class",
    "make_hook",
]
