"""The environment of a run: versions, platform, devices, and the process that writes it.

torch is imported by the functions that need it: reading a run does not.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from hookline._version import __version__
from hookline.masking import mask_arguments
from hookline.runs.jsonable import to_jsonable

__all__ = ["describe_environment", "describe_process", "installed_packages", "is_process_alive"]

_NAME_OR_VERSION = re.compile(r"^(Name|Version):[ \t]*(\S+)[ \t]*$", re.MULTILINE)


def describe_environment(device: Any = None) -> dict[str, Any]:
    """Return the environment of this process, as manifest fields."""
    import torch

    packages = installed_packages()
    listing = "\n".join(f"{name}=={version}" for name, version in packages.items())
    return {
        "command": mask_arguments(to_jsonable(sys.orig_argv)),
        "versions": {
            "hookline": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "packages": dict(packages),
        "packages_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        "platform": platform.platform(),
        "devices": _describe_devices(device),
        **describe_process(),
    }


def describe_process() -> dict[str, Any]:
    """Return what identifies this process, for `is_process_alive`."""
    return {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid": os.getpid(),
        "pid_started": _start_time(os.getpid()),
        "pid_namespace": _pid_namespace(),
    }


@lru_cache(maxsize=1)
def installed_packages() -> dict[str, str]:
    """Return the version of each installed distribution by name; read once per process."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        except Exception:  # a broken installation
            continue
        # `distribution.metadata` parses the whole text, with the package's README: 0.1 s for 250.
        fields = dict(_NAME_OR_VERSION.findall(text.partition("\n\n")[0]))
        if len(fields) == 2:
            name = fields["Name"].lower()
            versions.setdefault(name, fields["Version"])  # the first one on the path is imported
    return dict(sorted(versions.items()))


def _describe_devices(device: Any) -> dict[str, Any]:
    import torch

    used = None if device is None else torch.device(device)
    affinity = getattr(os, "sched_getaffinity", None)
    devices: dict[str, Any] = {
        "used": None if used is None else str(used),
        "cpus": os.cpu_count(),
        "cpus_usable": None if affinity is None else len(affinity(0)),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.device_count(),
        "names": None,
    }
    # Reading the names initializes CUDA, which costs memory: not if the model is on the CPU.
    if (used is not None and used.type == "cuda") or torch.cuda.is_initialized():
        devices["names"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return devices


def is_process_alive(process: Mapping[str, Any]) -> bool | None:
    """Return whether a process is alive; None if it runs in another container or on another host.

    Args:
        process: What `describe_process` returned in that process.
    """
    pid = process.get("pid")
    if type(pid) is not int or not 0 < pid < 2**31:  # others mean groups of processes
        return None
    if process.get("host") != socket.gethostname() or os.name != "posix":
        return None
    # Several hosts may have the same name.
    if process.get("pid_namespace") != _pid_namespace() or process.get("boot_id") != _boot_id():
        return None
    try:
        os.kill(pid, 0)  # only checks whether the process exists
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        pass
    started = _start_time(pid)
    return started is None or process.get("pid_started") in (None, started)


def _pid_namespace() -> str | None:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


@lru_cache(maxsize=1)
def _boot_id() -> str | None:
    """Return the id that the kernel chose when this machine started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks: a later one may have the same number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        state, *rest = text.rpartition(")")[2].split()  # the name before it may contain anything
        return -1 if state in "ZX" else int(rest[18])
    except (OSError, ValueError, IndexError):
        return None
