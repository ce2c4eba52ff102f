"""Evaluation without side effects, and the sizes of batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hookline.arguments import describe_value
from hookline.errors import TrainingError
from hookline.loop.random_state import random_state, restore_random_state
from hookline.tensors.nested import tensors_in

_TOKEN_TYPES = frozenset({torch.int64, torch.int32, torch.int16})


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


def make_counter(tokens_fn: Callable[[Any], Any]) -> Callable[[Any], int | None]:
    """Return a user's function that counts tokens, with a check of what it returns."""

    def count(batch: Any) -> int | None:
        tokens = tokens_fn(batch)
        try:
            return tokens if tokens is None or type(tokens) is int else int(tokens)
        except Exception as error:
            raise TrainingError(
                f"The function that counts tokens returned {describe_value(tokens)}; expected a "
                "whole number or None."
            ) from error

    return count


def count_tokens(batch: Any) -> int | None:
    """Return the number of tokens: the size of `input_ids`, or of integer inputs with 2 dimensions.

    None if the batch has neither. Bytes are not tokens: they are pixels more often.
    """
    if isinstance(batch, (tuple, list)):  # first: an abstract class costs more, as does a union
        inputs = batch[0] if batch else None
    elif isinstance(batch, dict) or isinstance(batch, Mapping):  # noqa: SIM101 (faster so)
        ids = batch.get("input_ids")
        return ids.numel() if isinstance(ids, torch.Tensor) else None
    else:
        inputs = batch
    if isinstance(inputs, torch.Tensor) and inputs.dtype in _TOKEN_TYPES and inputs.ndim > 1:
        return inputs.numel()
    return None
