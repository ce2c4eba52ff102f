"""Measure what `hookline run` adds to a script that trains nothing, in new processes.

The start-up module is run by every Python process of the script: launchers, workers of loaders,
helpers. Nothing of Hookline is imported before an optimizer is made.
"""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter

import hookline
from bench.harness import Row, Spread, interleave
from hookline.integrations.scripts.run_settings import RunSettings

__all__ = ["run"]

SCRIPTS = {
    "a script without torch": "pass",
    "a script that imports torch": "import torch",
    "    and makes an optimizer": "import torch; torch.optim.SGD([torch.zeros(1)])",
}
LIMITS = {"a script without torch": 5, "a script that imports torch": 60}


def run(*, quick: bool) -> list[Row]:
    package = Path(hookline.__file__).parent
    compileall.compile_dir(package, quiet=2)  # as pip does when it installs it
    with tempfile.TemporaryDirectory() as folder:
        settings = RunSettings(runs=folder).environment(os.environ)
        settings.pop("HOOKLINE_RUN_PROCESS")
        environments = {"plain": dict(os.environ), "hooks": settings}
        candidates = {
            f"{name} {kind}": partial(_run_process, code, environment)
            for name, code in SCRIPTS.items()
            for kind, environment in environments.items()
        }
        measured = interleave(candidates, rounds=3 if quick else 12, warmup=1)
        check = [_check_hooks(folder) for _ in range(2 if quick else 5)]
    rows = [
        Row(
            f"{name}, more with hookline run",
            measured.excess(f"{name} hooks", f"{name} plain").scaled(1e3),
            "ms",
            limit=LIMITS.get(name),
        )
        for name in SCRIPTS
    ]
    return [*rows, Row("the check before the script", Spread.of(check), "s")]


def _run_process(code: str, environment: Mapping[str, str]) -> float:
    """Return the processor's seconds of a process: the time depends on what else runs."""
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"The process has failed: {code}")
    return usage.ru_utime + usage.ru_stime


def _check_hooks(folder: str) -> float:
    """Return the seconds of the command itself."""
    begin = perf_counter()
    command = [sys.executable, "-m", "hookline", "run", "--runs", folder, "--print-env"]
    subprocess.run(command, check=True, capture_output=True)
    return perf_counter() - begin
