"""The attention that a module computes with torch's functions: its logits, or a bound of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

__all__ = ["AttentionCalls", "LogitStatistics"]

_FUSED = torch.nn.functional.scaled_dot_product_attention
_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward
_MULTI_HEAD_SIGNATURE = inspect.signature(_MULTI_HEAD)
_SOFTMAX = (torch.nn.functional.softmax, torch.softmax, Tensor.softmax)
_BLOCK = 1 << 22  # logits that are computed at once


@dataclass
class LogitStatistics:
    """What was measured of a module's attention, by measure: a value for each head."""

    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class AttentionCalls(TorchFunctionMode):
    """Measures softmax and fused attention in one call of a module; nothing is changed.

    A failure of a measurement is kept as `error`, so that the module does not fail.

    Args:
        heads: the number of heads, for logits whose first dimension is batch and heads together.
        recompute: compute the logits of fused attention.
    """

    def __init__(self, heads: int | None, *, recompute: bool) -> None:
        super().__init__()
        self.statistics = LogitStatistics()
        self.error: Exception | None = None
        self._heads = heads
        self._recompute = recompute
        self._handle: RemovableHandle | None = None

    def start(self, module: nn.Module) -> None:
        """Watch a module's call that begins, until it ends or raises, or until `stop`."""
        # A hook of its own, since the monitor may be disabled within the call. If the module
        # raises, only the last hook may be removed while PyTorch calls them: this one.
        self._handle = module.register_forward_hook(lambda *_: self.stop(), always_call=True)
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Watch no longer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            if self in _get_current_function_mode_stack():
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function; measure it first if it is attention."""
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            try:
                self._measure(func, args, kwargs)
            except Exception as error:
                self.error = error
        return func(*args, **kwargs)

    def _measure(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if func is _FUSED:
            self._measure_fused(*args, **kwargs)
        elif func is _MULTI_HEAD:  # what it calls is not seen
            self._measure_multi_head(*args, **kwargs)
        elif func in _SOFTMAX:
            self._measure_softmax(*args, **kwargs)

    @torch.no_grad()
    def _measure_softmax(self, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        if self.statistics.values or dim is None or not input.is_floating_point():
            return
        if input.ndim not in (3, 4) or dim not in (-1, input.ndim - 1):
            return
        logits = input.detach()
        if logits.ndim == 3:
            heads = self._heads or 1
            if len(logits) % heads:
                return
            logits = logits.unflatten(0, (-1, heads))
        largest, entropy = _measure_logits(logits)
        self.statistics.values.update(max_logit=largest, entropy=entropy)

    @torch.no_grad()
    def _measure_multi_head(self, *args: Any, **kwargs: Any) -> None:
        call = _MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if self.statistics.values or given["bias_k"] is not None or given["add_zero_attn"]:
            return
        query, key = _project(given)
        if not (given["need_weights"] or self._recompute):
            self._keep_bound(query, key, 1 / math.sqrt(query.shape[-1]))
            return
        mask = _join_masks(given, query, key)
        factor = 1 / math.sqrt(query.shape[-1])
        largest, entropy = _recompute(query, key, factor, mask, is_causal=False)
        self.statistics.values.update(max_logit=largest, entropy=entropy)

    def _keep_bound(self, query: Tensor, key: Tensor, factor: float) -> None:
        bound = _largest_norm(query) * _largest_norm(key) * abs(factor)
        self.statistics.values["max_logit_bound"] = bound.amax(0)

    @torch.no_grad()
    def _measure_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if self.statistics.values or query.is_nested or query.ndim < 3:
            return
        q, k = (_with_heads(one.detach(), self._heads) for one in (query, key))
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if k.shape[-3] != q.shape[-3]:  # grouped queries
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        if not self._recompute:
            self._keep_bound(q, k, factor)
            return
        mask = attn_mask
        if mask is not None and query.ndim == 3 and mask.ndim == 3:
            mask = _with_heads(mask, self._heads)
        largest, entropy = _recompute(q, k, factor, mask, is_causal=is_causal)
        self.statistics.values.update(max_logit=largest, entropy=entropy)


def _project(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the queries and keys of `multi_head_attention_forward`, by batch and head."""
    heads = given["num_heads"]
    weights = given["q_proj_weight"], given["k_proj_weight"]
    if not given["use_separate_proj_weight"]:
        weights = given["in_proj_weight"].chunk(3)[:2]
    bias = given["in_proj_bias"]
    biases = (None, None) if bias is None else bias.chunk(3)[:2]
    found: list[Tensor] = []
    for tensor, weight, own_bias in zip(
        (given["query"], given["key"]), weights, biases, strict=True
    ):
        batched = tensor if tensor.ndim == 3 else tensor.unsqueeze(1)  # positions, batch, features
        projected = torch.nn.functional.linear(batched, weight, own_bias).detach()
        found.append(projected.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3))
    return found[0], found[1]


def _join_masks(given: Mapping[str, Any], query: Tensor, key: Tensor) -> Tensor | None:
    """Return what `multi_head_attention_forward` adds to the logits."""
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    joined: Tensor | None = None
    if mask is not None:
        joined = _as_addend(mask)
        if joined.ndim == 3:
            joined = joined.view(len(query), -1, *joined.shape[1:])
    if padding is not None:
        added = _as_addend(padding).view(len(query), 1, 1, key.shape[-2])
        joined = added if joined is None else joined + added
    return joined


def _as_addend(mask: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)


def _with_heads(tensor: Tensor, heads: int | None) -> Tensor:
    """Return a tensor with the dimensions batch, heads, positions and features."""
    if tensor.ndim == 3:
        fits = heads is not None and len(tensor) % heads == 0
        split: Tensor = tensor.unflatten(0, (-1, heads if fits and heads else 1))
        return split
    return tensor.flatten(0, -4)


def _largest_norm(vectors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)
    return norms.amax(-1)


def _measure_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit and the mean entropy of each head."""
    logits = logits.float()
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return logits.amax((0, 2, 3)), entropy.mean((0, 2))


def _recompute(
    query: Tensor, key: Tensor, factor: float, mask: Tensor | None, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute the logits in blocks of queries; return what `_measure_logits` does."""
    batch, heads, length, _ = query.shape
    rows = max(1, _BLOCK // (batch * heads * key.shape[-2]))
    keys = key.float().transpose(-2, -1)
    largest: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, length, rows):
        block = query[..., start : start + rows, :].float()
        logits = block @ keys * factor
        if is_causal:
            positions = torch.arange(start, start + block.shape[-2], device=query.device)
            later = torch.arange(key.shape[-2], device=query.device) > positions[:, None]
            logits = logits.masked_fill(later, -math.inf)
        if mask is not None:
            part = mask if mask.shape[-2] == 1 else mask[..., start : start + rows, :]
            if part.dtype is torch.bool:
                logits = logits.masked_fill(~part, -math.inf)
            else:
                logits = logits + part
        own_largest, own_entropy = _measure_logits(logits)
        largest.append(own_largest)
        entropies.append(own_entropy * block.shape[-2])
    return torch.stack(largest).amax(0), torch.stack(entropies).sum(0) / length
