"""Run by `old_runs.py`, in one process or by `torchrun` in two: train, or continue a run."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from old_runs import continue_runs

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for library in ("transformers", "lightning.pytorch"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    continue_runs(Path(sys.argv[1]), *sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # gloo threads sometimes abort the interpreter while it exits
