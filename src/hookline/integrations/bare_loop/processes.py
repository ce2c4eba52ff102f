"""The processes of a loop: the first one writes, and decides for all."""

from __future__ import annotations

import os
from typing import Any

import torch

from hookline.errors import LoopError

__all__ = ["first_rank_decides", "is_main_process"]


def is_main_process() -> bool:
    """Return whether this is the first process of the job."""
    if _has_group():
        return torch.distributed.get_rank() == 0
    return int(os.environ.get("RANK") or 0) == 0  # as torchrun sets it, before there is a group


def first_rank_decides(value: Any) -> Any:
    """Return the first process's value in all processes. All of them have to call this.

    Raises:
        LoopError: there are several processes, which cannot talk to each other yet.
    """
    if not _has_group():
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise LoopError(
                "The processes of this job cannot agree on a checkpoint, because there is no "
                "process group yet. Call `torch.distributed.init_process_group` first, or give the "
                "checkpoint's path."
            )
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
