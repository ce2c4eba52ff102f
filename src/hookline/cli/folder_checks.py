"""Whether runs can be written to a folder, asked before anything takes time."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import typer

__all__ = ["check_folder"]


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder in which no run can be made; nothing is left behind.

    Args:
        folder: the folder of all runs; it need not be there yet.
        option: what it was given as, for the error.
    """
    there = folder
    problem = "is a file"
    try:
        while not there.exists() and there != there.parent:
            if there.is_symlink():
                raise OSError(errno.ENOENT, "it leads nowhere")
            there = there.parent
        if there.is_dir() or there != folder:
            with tempfile.TemporaryDirectory(dir=there):
                return
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
    raise typer.BadParameter(
        f"'{folder}' {problem}; expected a folder, or the name of one to make.",
        param_hint=f"'{option}'",
    )
