"""Commands in processes of their own, as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HOOKLINE = [sys.executable, "-m", "hookline"]
ENVIRONMENT = {
    **os.environ,
    "COLUMNS": "100",
    "NO_COLOR": "1",
    # One thread: as fast for small models, and the time depends less on other processes.
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def run_command(
    *command: str | int | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with these variables added to the environment."""
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
    )


def run_hookline(
    *arguments: str | int | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `hookline` with these arguments."""
    return run_command(*HOOKLINE, *arguments, cwd=cwd, **environment)


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script that is given as text."""
    return run_command(sys.executable, "-c", script)
