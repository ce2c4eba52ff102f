"""Check that runs can be written to a folder, before anything takes time."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import typer

__all__ = ["check_folder"]


def check_folder(folder: Path, option: str) -> None:
    """Raise if no run can be written to a folder; nothing is left behind.

    Args:
        folder: the folder of all runs, which need not exist yet.
        option: the name of the option, for the error.
    """
    existing = folder
    problem = "is a file"
    try:
        while not existing.exists() and existing != existing.parent:
            if existing.is_symlink():
                raise OSError(errno.ENOENT, "broken symbolic link")
            existing = existing.parent
        if existing.is_dir() or existing != folder:
            with tempfile.TemporaryDirectory(dir=existing):
                return
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
    raise typer.BadParameter(
        f"'{folder}' {problem}; expected a folder, or the name of a new one.",
        param_hint=f"'{option}'",
    )
