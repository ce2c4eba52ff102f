"""File systems that only one process sees: small ones, and read-only ones."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000


def enter_namespace() -> None:
    """Give this process mounts of its own; they vanish with it. Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if user else 0)) != 0:
        raise OSError(ctypes.get_errno(), "unshare failed")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount("--make-rprivate", "/")


def mount_small(folder: Path, size: str) -> None:
    """Mount an empty file system of this size, such as "1m"."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))


def make_read_only(folder: Path, aside: Path) -> None:
    """Make a folder read-only, also for root; files that are open in it stay writable.

    Args:
        folder: the folder.
        aside: another one, which becomes the same.
    """
    aside.mkdir()
    _mount("--bind", str(folder), str(aside))
    _mount("-o", "remount,bind,ro", str(aside))  # fails where a file is open for writing
    _mount("--bind", str(aside), str(folder))


def can_mount() -> bool:
    """Return whether a process may have mounts of its own here."""
    code = "import namespaces; namespaces.enter_namespace()"
    here = Path(__file__).parent
    return subprocess.run([sys.executable, "-c", code], cwd=here, check=False).returncode == 0


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)
