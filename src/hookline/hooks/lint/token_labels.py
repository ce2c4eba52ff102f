"""The tokens that a language model gets, and how its labels are shifted against them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MIN_TOKENS = 4  # in a sequence
_MIN_COMPARED = 8
_OTHER_INPUTS = ("mask", "position", "type", "label", "target", "segment", "doc", "seq", "length")


def token_ids(inputs: dict[str, Tensor]) -> Tensor | None:
    """Return the token numbers among a model's inputs, of shape (samples, tokens), or None."""
    for name, tensor in inputs.items():
        if any(part in name for part in _OTHER_INPUTS):
            continue
        is_whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
        if is_whole and tensor.ndim == 2 and tensor.shape[1] >= _MIN_TOKENS:
            return tensor
    return None


def aligned(target: Tensor, ids: Tensor) -> Tensor | None:
    """Return labels as (samples, positions); None if they are not labels of these tokens.

    The last one or two positions may have no label.
    """
    samples, tokens = ids.shape
    if target.is_floating_point() or target.device != ids.device:
        return None
    for width in (tokens, tokens - 1, tokens - 2):
        if target.numel() == samples * width:
            return target.reshape(samples, width)
    return None


def is_shifted_by(count: int, target: Tensor, ids: Tensor) -> Tensor:
    """Return whether each label, of those that are not negative, is the token `count` later."""
    width = min(target.shape[1], ids.shape[1] - count)
    labels, tokens = target[:, :width], ids[:, count : count + width]
    is_compared = labels >= 0
    is_same = ((labels == tokens) | ~is_compared).all()
    return is_same & (is_compared.sum() >= _MIN_COMPARED)


def is_any_shifted_by(count: int, targets: Iterable[Tensor], ids: Tensor) -> Tensor:
    """Return whether one of the targets is shifted by `count`."""
    known = [aligned(target, ids) for target in targets]
    found = [is_shifted_by(count, target, ids) for target in known if target is not None]
    return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool)


def other_tokens(ids: Tensor) -> Tensor:
    """Return different numbers, between the smallest and the largest of these."""
    return torch.where(ids == ids.max(), ids.min(), ids + 1)
