"""A copy of a model's weights and a training's state, as the bytes of a checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint.state_tree import Encoder, is_text
from hookline.checkpoint.tensor_files import TensorBuffer
from hookline.errors import CheckpointError
from hookline.tensors.sharded import Shard, is_sharded, shard_of

__all__ = ["EncodedState", "SnapshotBuffers", "encode_info", "encode_state"]


@dataclass(frozen=True)
class EncodedState:
    """A state whose Python values are copied, and whose tensors are still those of training."""

    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    tree: Any  # as JSON, see `state_tree`
    weight_shards: Mapping[str, Shard]
    tensor_shards: Mapping[str, Shard]

    def shards_only(self) -> EncodedState:
        """Return what a rank other than 0 writes: its shards that no rank before it has."""
        weights = {name: one for name, one in self.weight_shards.items() if one.is_first}
        tensors = {name: one for name, one in self.tensor_shards.items() if one.is_first}
        return EncodedState(
            {name: one.values for name, one in weights.items()},
            {name: one.values for name, one in tensors.items()},
            None,
            weights,
            tensors,
        )


@torch.no_grad()
def encode_state(model: Mapping[str, Any], state: Mapping[str, Any]) -> EncodedState:
    """Encode Python values as JSON and collect the tensors.

    Raises:
        CheckpointError: A value cannot be saved.
    """
    weights = {k: v for k, v in model.items() if isinstance(v, Tensor)}
    for name in weights:
        if name == "__metadata__" or not is_text(name):
            raise CheckpointError(
                f"A weight is called {name!r}, which the format safetensors does not allow. Rename "
                "the parameter or buffer."
            )
    shards = {name: shard_of(value) for name, value in weights.items() if is_sharded(value)}
    # It raises if a weight cannot be saved; parts of a `DTensor` always can.
    Encoder("model").encode({k: v for k, v in weights.items() if k not in shards})
    weights |= {name: shard.values for name, shard in shards.items()}
    encoder = Encoder("state")
    extra = {k: v for k, v in model.items() if k not in weights}  # from `get_extra_state`
    tree = {"state": encoder.encode(dict(state)), "model": encoder.encode(extra)}
    metadata = getattr(model, "_metadata", None)  # the versions of modules
    if metadata is not None:
        tree["metadata"] = encoder.encode(dict(metadata), "['_metadata']")
    return EncodedState(weights, encoder.tensors, tree, shards, encoder.shards)


def encode_info(info: Mapping[str, Any]) -> Any:
    """Encode a manifest's `info`. Tensors with one element become numbers."""
    return Encoder("info", numbers_only=True).encode(dict(info))


class SnapshotBuffers:
    """Memory for one copy of a state, which is reused for the next one."""

    def __init__(self) -> None:
        self._weights = TensorBuffer()
        self._tensors = TensorBuffer()

    def reserve(self, state: EncodedState) -> None:
        """Allocate the memory for states like this one."""
        self._weights.reserve(state.weights, state.weight_shards)
        self._tensors.reserve(state.tensors, state.tensor_shards)

    def copy(self, state: EncodedState, rank: int = 0) -> dict[str, memoryview]:
        """Copy the tensors of a state; return the contents of their files until the next call.

        A rank other than 0 has files for its shards, `model-1.safetensors`.
        """
        self._weights.copy(state.weights, state.weight_shards)
        self._tensors.copy(state.tensors, state.tensor_shards)
        number = f"-{rank}" if rank else ""
        return {
            f"model{number}.safetensors": self._weights.data,
            f"state{number}.safetensors": self._tensors.data,
        }
