"""Checking a saved position in the data against the loaders, before anything is restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hookline.errors import CheckpointError
from hookline.loop.random_state import describe_generators, describe_random_state, generators_of
from hookline.trainer.data_position import DataPosition
from hookline.trainer.data_stream import Stream
from hookline.trainer.loader_passes import skips_indices

__all__ = ["describe_position"]

_MAX_BATCHES = 10**9  # of an epoch whose length is not known; they are counted one by one
_DATALOADER_FIELDS = ("indices", "reuses_workers", "worker_seed")


def describe_position(
    saved: Mapping[str, Any],
    stream: Stream | None,
    val_loaders: Sequence[Any],
    *,
    fast_forward: bool,
) -> list[str]:
    """Return why training cannot continue at a saved position, one line each.

    Args:
        saved: A position of the right form.
        stream: The training data; None if there is none yet.
        val_loaders: The loaders for validation.
        fast_forward: See `DataPosition`.
    """
    lines = describe_random_state(saved["now"])
    lines += describe_generators(val_loaders, saved["val_generators"])
    if stream is None or not saved["loaders"]:
        return lines
    try:
        DataPosition(fast_forward=fast_forward).check_resumable(stream, saved)
    except CheckpointError as error:
        return [*lines, str(error)]
    lines += describe_generators(stream.loaders, saved["generators"])
    length = stream.length()
    if saved["batches"] > (_MAX_BATCHES if length is None else length):
        lines.append(
            f"The checkpoint was made after {saved['batches']} batches of epoch {saved['epoch']}, "
            f"but it has only {_MAX_BATCHES if length is None else length}. Resume with the data "
            "of the run."
        )
    for name, loader, before in zip(stream.names, stream.loaders, saved["loaders"], strict=True):
        ended = sum(length * times for length, times in before["ended"])
        if ended > saved["batches"] or any(0 in pair for pair in before["ended"]):
            lines.append(f"the passes over the train loader '{name}' are not valid")
        found = _describe_seed(before["worker_seed"])
        if before["pass"] is not None:
            found += _describe_pass(loader, before["pass"], before["samples"])
        lines += [f"train loader '{name}': {line}" for line in found]
    return lines


def _describe_pass(loader: Any, saved: Mapping[str, Any], samples: int | None) -> list[str]:
    starts = [saved["start"]]
    lines: list[str] = []
    if skips_indices(loader) and "loader" not in saved:
        missing = [name for name in _DATALOADER_FIELDS if name not in saved]
        lines += [f"its position has no '{name}'" for name in missing]
    lines += _describe_seed(saved.get("worker_seed"))
    indices = saved.get("indices")
    if indices is not None:
        starts += [indices["start"], indices["first"]]
        if not all(_is_index(one, samples) for one in indices["recent"]):
            lines.append("its position has indices that the dataset does not have")
    generators = generators_of([loader])
    for start in starts:
        lines += describe_random_state(start["random"])
        lines += describe_generators([loader], start["generators"])
        if len(start["generators"]) != len(generators):
            lines.append(
                f"it has {len(generators)} generators, and the checkpoint "
                f"{len(start['generators'])}"
            )
    return lines


def _describe_seed(seed: torch.Tensor | None) -> list[str]:
    try:
        if seed is not None:
            torch.Generator().set_state(seed.cpu())
    except (RuntimeError, TypeError) as error:
        return [f"the seed of its workers is not valid: {error}"]
    return []


def _is_index(index: Any, samples: int | None) -> bool:
    """Return whether a saved index, or a batch of them, can be one of the dataset."""
    if isinstance(index, torch.Tensor):
        index = index.tolist() if index.dtype == torch.int64 and index.dim() == 1 else None
    if type(index) in (list, tuple):
        return all(_is_index(one, samples) for one in index)
    if type(index) is int:
        return samples is None or -samples <= index < samples
    return type(index) is str
