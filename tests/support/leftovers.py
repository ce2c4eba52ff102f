"""Temporary folders of writers that died, for tests of what is removed and what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WRITER = """
import os, sys
from pathlib import Path
from hookline.checkpoint.atomic_files import temporary_folder
with temporary_folder(Path(sys.argv[1]), sys.argv[2]) as folder:
    (folder / sys.argv[2]).mkdir()
    (folder / sys.argv[2] / "model.safetensors").write_bytes(b"half")
    print(folder, flush=True)
    sys.stdin.readline()
    os._exit(1)
"""


class UnfinishedWriter:
    """A process that has written half a folder, and waits until it is told to die."""

    def __init__(self, parent: Path, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(parent), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.folder = Path(self._process.stdout.readline().strip())
        assert self.folder.parent == parent

    def die(self) -> None:
        """End the process without any clean-up."""
        self._process.communicate("die")
        assert self._process.returncode == 1


def leave_unfinished_folder(parent: Path, name: str) -> Path:
    """Return a temporary folder whose writer died."""
    writer = UnfinishedWriter(parent, name)
    writer.die()
    assert (writer.folder / name / "model.safetensors").read_bytes() == b"half"
    return writer.folder
