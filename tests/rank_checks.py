"""Running checks in several processes: a test starts them with torchrun, each calls the checks."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

HERE = Path(__file__).parent


def start_ranks(script: str | Path, *arguments: str | Path, ranks: int = 2) -> Any:
    """Start a script of this folder under torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [*launch, "--nproc_per_node", str(ranks), str(HERE / script), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **pipes,
    )


def run_ranks(script: str | Path, *arguments: str | Path, ranks: int = 2) -> str:
    """Run a script of this folder under torchrun; return what its ranks printed."""
    process = start_ranks(script, *arguments, ranks=ranks)
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-6000:]
    return str(output)


def check_in_all_ranks(*checks: Callable[[], None], backend: str = "gloo") -> None:
    """Call the checks in a process that torchrun has started, and end it."""
    faulthandler.dump_traceback_later(240, exit=True)  # says where a rank waits for ever
    dist.init_process_group(backend)
    for check in checks:
        check()
    print(f"rank {dist.get_rank()} fine", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo threads sometimes abort the interpreter while it exits
