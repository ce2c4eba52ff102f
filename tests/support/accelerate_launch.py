"""`accelerate launch`, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# On a machine without GPUs, `--multi_gpu` starts processes on the CPU; `--cpu` starts one process.
LAUNCH = ("-m", "accelerate.commands.launch", "--num_machines", "1", "--dynamo_backend", "no")


TWO = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")


def launch(*arguments: str, options: tuple[str, ...] = (), cwd: Path | None = None) -> None:
    command = [sys.executable, *LAUNCH, "--mixed_precision", "no", *options, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
