"""Tensors of which each rank has a part."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

__all__ = ["is_sharded", "local", "whole"]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor. Importing them takes half a second: who has one has done so."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor. Of a sharded one all ranks have to ask, or the others wait."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which shares its memory."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor
