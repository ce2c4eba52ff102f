"""Evaluation without side effects, and the sizes of batches."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hookline.loop.random_state import random_state, restore_random_state
from hookline.tensors.nested import tensors_in

__all__ = ["evaluation", "samples_in", "tokens_in"]


@contextmanager
def evaluation(model: torch.nn.Module, device: torch.device) -> Generator[None]:
    """Run the block in eval mode without gradients; restore modes and random states after it."""
    modes = {module: module.training for module in model.modules()}
    state = random_state(device)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        restore_random_state(state, device)


def samples_in(batch: Any) -> int:
    """Return the number of samples: the size of the first tensor's first dimension, or 1."""
    first = next(iter(tensors_in(batch)), None)
    return first.shape[0] if first is not None and first.ndim else 1


def tokens_in(batch: Any) -> int:
    """Return the number of tokens: the size of the batch's `input_ids`, or 0."""
    if type(batch) is tuple or type(batch) is list:
        return 0  # the usual case, without the cost of an abstract class
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, torch.Tensor):
            return ids.numel()
    return 0
