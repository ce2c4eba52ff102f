"""Hooks that installed packages bring: entry points in the group `hookline.hooks`.

    [project.entry-points."hookline.hooks"]
    loss_ceiling = "acme_hooks:LossCeiling"

Nothing is imported here: what a package says of itself is read from its metadata.
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
    """Where its class is: `package.module.Class`."""

    package: str
    """The package as it is installed, such as `acme-hooks`."""

    @property
    def full_name(self) -> str:
        """A name that no other package's hook has: `acme-hooks:loss_ceiling`."""
        return f"{self.package}:{self.name}"


def packaged_hooks() -> tuple[PackagedHook, ...]:
    """Return the hooks of all installed packages, by package and name."""
    return _found_on(tuple(sys.path))


@lru_cache(maxsize=8)
def _found_on(path: tuple[str, ...]) -> tuple[PackagedHook, ...]:
    """Look through the metadata once for each search path: it takes milliseconds."""
    found = {
        PackagedHook(
            name=point.name,
            path=".".join(part for part in (point.module, point.attr) if part),
            package=point.dist.name if point.dist is not None else "unknown",
        )
        for point in entry_points(group=GROUP)
    }
    return tuple(sorted(found, key=lambda one: (one.package, one.name)))
