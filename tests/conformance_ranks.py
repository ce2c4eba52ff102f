"""Run by `torchrun` with two ranks: the hooks of `conformance.py` in all loops and strategies.

Each rank writes what its hooks saw, by loop.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from conformance import Halve, run
from hosts import LOOPS_OF_RANKS, MISSING
from rank_checks import check_in_all_ranks


def run_loops() -> None:
    """Train in one loop after the other, in the same process group."""
    folder, *chosen = sys.argv[1:]
    found = {}
    for name in chosen or LOOPS_OF_RANKS:
        begun = time.monotonic()
        own = Path(folder) / name.replace(" ", "_")
        found[name] = run(LOOPS_OF_RANKS[name], own, Halve(), missing=MISSING.get(name, ()))
        if dist.get_rank() == 0:
            print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    torch.save(found, Path(folder) / f"{dist.get_rank()}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for library in ("transformers", "lightning.pytorch"):
        logging.getLogger(library).setLevel(logging.ERROR)
    check_in_all_ranks(run_loops)
