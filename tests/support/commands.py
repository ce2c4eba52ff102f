"""Commands: in processes of their own, as a user runs them, or in this process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from warm_processes import run_warm

from hookline.cli.app import main

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
    """Run `hookline` with these arguments, in a process that has imported torch already."""
    words = [str(part) for part in arguments]
    variables = {**ENVIRONMENT, **environment}
    return run_warm(["-m", "hookline", *words], cwd=cwd, environment=variables)


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script that is given as text."""
    return run_command(sys.executable, "-c", script)


def run_in_process(
    *arguments: str | int | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `hookline` in this process, which saves the time of starting one.

    Modules that it imports from `cwd` and from beside it are forgotten afterwards.
    """
    out, err = io.StringIO(), io.StringIO()
    folder = (cwd or Path.cwd()).resolve()
    before = set(sys.modules)
    code: object = None
    words = ["hookline", *map(str, arguments)]
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "path", list(sys.path)),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(folder.parent):
            del sys.modules[name]
    code = code if isinstance(code, int) else int(code is not None)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def call_hookline(*arguments: str | int | Path, cwd: Path | None = None) -> tuple[int, str]:
    """Run `hookline` in this process; return the exit code and what it prints on both streams."""
    done = run_in_process(*arguments, cwd=cwd)
    return done.returncode, done.stdout + done.stderr
