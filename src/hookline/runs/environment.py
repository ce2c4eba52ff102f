"""Where a run takes place: versions, platform, devices, the process."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch

from hookline._version import __version__
from hookline.runs.jsonable import plain
from hookline.runs.writer_process import process_facts

__all__ = ["device_facts", "environment", "packages"]


def environment(device: Any = None) -> dict[str, Any]:
    """Return the facts of this process's surroundings.

    Args:
        device: where the model is trained; None when nobody knows.
    """
    installed = packages()
    listing = "\n".join(f"{name}=={version}" for name, version in installed.items())
    return {
        "command": plain(sys.orig_argv),
        "versions": {
            "hookline": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "packages": dict(installed),
        "packages_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        "platform": platform.platform(),
        "devices": device_facts(device),
        "host": socket.gethostname(),
        **process_facts(),
    }


@lru_cache(maxsize=1)
def packages() -> dict[str, str]:
    """Return the version of each installed distribution, by name; read once in a process."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        try:
            about = distribution.metadata  # read once: each look parses the file anew
            name, version = about["Name"], about["Version"]
        except Exception:  # a broken installation of somebody else's
            continue
        if name and version:
            found.setdefault(name.lower(), version)  # the first one on the path is imported
    return dict(sorted(found.items()))


def device_facts(device: Any) -> dict[str, Any]:
    """Return which devices there are, and which one is used."""
    used = None if device is None else torch.device(device)
    usable = getattr(os, "sched_getaffinity", None)
    facts: dict[str, Any] = {
        "used": None if used is None else str(used),
        "cpus": os.cpu_count(),
        "cpus_usable": None if usable is None else len(usable(0)),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.device_count(),
        "names": None,
    }
    # Asking CUDA for names starts it, which who trains on the CPU pays for in memory.
    if (used is not None and used.type == "cuda") or torch.cuda.is_initialized():
        facts["names"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts
