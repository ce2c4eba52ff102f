"""A barrier with a time limit, for processes before a collective.

A collective waits for all its processes, and a process that never comes makes the others wait until
the process group's time limit, which is long and fails for all. A barrier in the process group's
store costs a few short messages to it, and tells which processes are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def barrier_with_timeout(purpose: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """Wait until all ranks have called this for the same purpose; return those that have not."""
    from torch.distributed.distributed_c10d import _get_default_store

    store, size = _get_default_store(), len(ranks)
    key = f"hookline/{purpose}/{'-'.join(map(str, ranks))}"
    met = f"{key}/{dist.get_rank()}/met"  # how often this rank has met the others
    meeting = store.add(met, 0) + 1
    store.set(f"{key}/{dist.get_rank()}/{meeting}", "here")
    if store.add(key, 1) == meeting * size:
        store.set(f"{key}/{meeting}", "complete")
    else:
        try:
            store.wait([f"{key}/{meeting}"], timedelta(seconds=seconds))
        except RuntimeError:  # the time limit
            if store.add(key, -1) != meeting * size - 1:  # else the last one has just come
                store.delete_key(f"{key}/{dist.get_rank()}/{meeting}")  # for those that come later
                others = [rank for rank in ranks if rank != dist.get_rank()]
                absent = [r for r in others if not store.check([f"{key}/{r}/{meeting}"])]
                return absent or others  # if all have come, some are leaving just now
            store.add(key, 1)
    store.add(met, 1)
    store.delete_key(f"{key}/{dist.get_rank()}/{meeting}")
    store.delete_key(f"{key}/{meeting - 1}")  # all ranks have left it
    return []
