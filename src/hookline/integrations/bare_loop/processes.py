"""The processes of a loop: the first one writes, and decides for all."""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = ["first_rank_decides", "is_main_process"]


def is_main_process() -> bool:
    """Return whether this is the first process of the job."""
    if _has_group():
        return torch.distributed.get_rank() == 0
    return int(os.environ.get("RANK") or 0) == 0  # as torchrun sets it, before there is a group


def first_rank_decides(value: Any) -> Any:
    """Return the first process's value in all processes. All of them have to call this."""
    if not _has_group() or torch.distributed.get_world_size() == 1:
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
