"""Hashes of the program's own source files, which tell whether two runs had the same code."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

__all__ = ["hash_sources"]

_MAX_FILES = 500
_MAX_BYTES = 20_000_000  # of one file


def hash_sources() -> dict[str, str | None]:
    """Return the SHA-256 of the file of each module that is loaded, by the module's name.

    The modules are the program (`__main__`) and all others that belong to no installed package and
    not to Python: the versions of those are known. The hash is None where it is not known: of a
    notebook, which has no file, and of files that cannot be read. It never raises.
    """
    loaded, paths = dict(sys.modules), sysconfig.get_paths()
    python = tuple(f"{paths[name]}{os.sep}" for name in ("stdlib", "platstdlib", "scripts"))

    def is_own(file: str) -> bool:
        return "-packages" + os.sep not in file and not file.startswith(python)

    tops = {name for name in loaded if "." not in name and name not in ("hookline", "__mp_main__")}
    tops = {name for name in tops if is_own(_file_of(loaded[name]) or "")}
    names = sorted(name for name in loaded if name.partition(".")[0] in tops)
    files = {name: _file_of(loaded[name]) for name in names}
    own = [(name, file) for name, file in files.items() if file is not None and is_own(file)]
    hashes = {name: _hash(file) for name, file in own[:_MAX_FILES]}
    if len(own) > _MAX_FILES:
        hashes["more modules"] = None
    if _file_of(loaded.get("__main__")) is None:
        hashes["__main__"] = None  # a notebook, or an interpreter
    return hashes


def _file_of(module: Any) -> str | None:
    """Return the absolute path of a module's file; None if it has none."""
    try:
        file = vars(module).get("__file__")
    except Exception:  # a program may put anything into sys.modules
        return None
    return file if type(file) is str and Path(file).is_absolute() else None


def _hash(file: str) -> str | None:
    try:
        path = Path(file)
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
