"""Numbers of sharded tensors and of loops in several processes, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script: str, ranks: int, *arguments: str) -> str:
    """Run a script of this folder under torchrun; return what its ranks printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(ranks), str(HERE / script), *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def test_numbers_of_sharded_tensors_are_those_of_whole_ones() -> None:
    assert run("distributed_numbers.py", 4).count("fine") == 4


def test_hooks_in_bare_loops_under_ddp_and_fsdp2_get_the_numbers_of_one_process(
    tmp_path: Path,
) -> None:
    assert run("distributed_loops.py", 2, str(tmp_path)).count("fine") == 2
