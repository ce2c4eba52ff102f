"""The tokens that a language model gets, and how its labels are shifted against them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MIN_TOKENS = 4  # in a sequence
_MIN_COMPARED = 8
_OTHER_INPUTS = (
    *("mask", "position", "type", "label", "target", "segment", "doc_", "document", "length"),
    *("seq_id", "seq_len", "sequence_id"),
)


def token_inputs(inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return what may be token numbers among a model's inputs, of shape (samples, tokens)."""
    return [
        tensor
        for name, tensor in inputs.items()
        if not any(part in name for part in _OTHER_INPUTS)
        and not tensor.is_floating_point()
        and tensor.dtype != torch.bool
        and tensor.ndim == 2
        and tensor.shape[1] >= _MIN_TOKENS
    ]


def token_ids(inputs: dict[str, Tensor]) -> Tensor | None:
    """Return the token numbers that come first, or None."""
    return next(iter(token_inputs(inputs)), None)


def are_targets(tensors: Iterable[Tensor], targets: Iterable[Tensor]) -> Tensor:
    """Return whether each tensor is one of the targets, whatever its shape."""
    targets = list(targets)
    found = [
        torch.stack(
            [
                (tensor.flatten() == target.flatten()).all()
                for target in targets
                if target.numel() == tensor.numel() and target.device == tensor.device
            ]
            or [torch.zeros((), dtype=torch.bool)]
        ).any()
        for tensor in tensors
    ]
    return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool)


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
