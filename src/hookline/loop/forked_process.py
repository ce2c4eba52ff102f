"""A forked process: the loops that its parent trains are left to the parent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from hookline.loop.loop import Loop

__all__ = ["leave_in_forks", "stay_in_forks"]

_training: WeakSet[Loop] = WeakSet()
_is_registered = False  # whether Python calls `_detach_loops` in forked processes


def leave_in_forks(loop: Loop) -> None:
    """Detach this loop, which begins to train, in every process that is forked from now on.

    A worker of a `DataLoader` is such a process, and so is one that the script forks itself: their
    copy of the loop must not call hooks or write to the run. A loop that has not begun is left
    alone, since a forked process may be the one that trains it.
    """
    global _is_registered
    if not _is_registered and hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_detach_loops)
        _is_registered = True
    _training.add(loop)


def stay_in_forks(loop: Loop) -> None:
    """Do nothing with this loop when a process is forked: it has ended."""
    _training.discard(loop)


def _detach_loops() -> None:
    for loop in list(_training):
        loop.detach_in_fork()
    _training.clear()
