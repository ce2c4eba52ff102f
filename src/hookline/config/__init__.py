"""From names and class paths to hooks, and from a configuration to a registry of hooks.

`names` has what a name stands for, `entry_points` what installed packages bring, `items` reads the
hooks of a configuration, `registry` is the `HookRegistry`, `given` what it is called with by hand.
"""

from hookline.config.hook_items import SECTIONS
from hookline.config.hook_names import (
    BUILT_INS,
    PROBES,
    Known,
    known_hooks,
    load_class,
    load_hook_class,
    make_hook,
    where_is,
)
from hookline.config.registry import HookRegistry

__all__ = [
    "BUILT_INS",
    "PROBES",
    "SECTIONS",
    "HookRegistry",
    "Known",
    "known_hooks",
    "load_class",
    "load_hook_class",
    "make_hook",
    "where_is",
]
