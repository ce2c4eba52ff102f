"""Hooks of installed packages: entry points in the group `hookline.hooks`.

    [project.entry-points."hookline.hooks"]
    loss_ceiling = "acme_hooks:LossCeiling"

Only package metadata is read; no hook is imported.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points

__all__ = ["GROUP", "PackagedHook", "packaged_hooks"]

GROUP = "hookline.hooks"


@dataclass(frozen=True)
class PackagedHook:
    """A hook of an installed package."""

    name: str
    path: str
    """The class path: `package.module.Class`."""

    package: str
    """The name of the distribution, such as `acme-hooks`."""

    @property
    def full_name(self) -> str:
        """The name with its package, which is unique: `acme-hooks:loss_ceiling`."""
        return f"{self.package}:{self.name}"


def packaged_hooks() -> tuple[PackagedHook, ...]:
    """Return the hooks of all installed packages, sorted by package and name."""
    return _read_entry_points(tuple(sys.path))


@lru_cache(maxsize=8)
def _read_entry_points(search_path: tuple[str, ...]) -> tuple[PackagedHook, ...]:
    """Read the metadata of all packages, once per search path because it takes milliseconds."""
    hooks = {
        PackagedHook(
            name=point.name,
            path=".".join(part for part in (point.module, point.attr) if part),
            package=point.dist.name if point.dist is not None else "unknown",
        )
        for point in entry_points(group=GROUP)
    }
    return tuple(sorted(hooks, key=lambda hook: (hook.package, hook.name)))
