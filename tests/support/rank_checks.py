"""Running checks in several processes: a test starts them with torchrun, each calls the checks."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from warm_processes import run_warm_together

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


def run_ranks(
    script: str | Path,
    *arguments: str | Path,
    ranks: int = 2,
    cwd: Path | None = None,
    imports: Sequence[str] = (),
) -> str:
    """Run a script of this folder, or `-m` and a module, in several processes.

    Returns what they printed.

    The processes have the variables and the store that torchrun would give them, and have imported
    torch already. Where the end of a process matters to the others, use `start_ranks`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        environments = [
            os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_ERROR_FILE": str(Path(folder, f"error-{rank}.json")),
            }
            for rank in range(ranks)
        ]
        first = script if script == "-m" else HERE / script
        command = [str(first), *map(str, arguments)]
        done = run_warm_together(command, environments, cwd=cwd, seconds=300, imports=imports)
    assert not any(each.returncode for each in done), "".join(each.stderr[-3000:] for each in done)
    return "".join(each.stdout for each in done)


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
