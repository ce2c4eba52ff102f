"""AttentionMonitor: logs the largest attention logit and the entropy of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from hookline.errors import HookConfigError
from hookline.hooks.monitoring.monitor_bases import ModuleMonitor
from hookline.probes.attention import FunctionWatch
from hookline.probes.call import Call
from hookline.probes.module_selection import Which
from hookline.tensors.name_patterns import module_places

_FUSED = torch.nn.functional.scaled_dot_product_attention
_SOFTMAX = (torch.nn.functional.softmax, torch.softmax, Tensor.softmax)
_BLOCK = 1 << 22  # logits that are measured at once


class AttentionMonitor(ModuleMonitor):
    """Logs the largest attention logit, and the entropy of the attention weights.

    The values are `attention/<module>/<measure>`, of a module's first call in a step:

    | measure | meaning |
    |---|---|
    | `max_logit` | the largest logit that enters the softmax, over all heads |
    | `entropy` | of the weights before dropout, in nats, the mean over queries and heads |
    | `max_logit_bound` | no logit is larger: the largest norms of queries and keys, multiplied |

    The logits are those after scaling, masks and biases. If they grow without end, attention
    collapses to single tokens, and training diverges (arXiv 2309.14322).

    A module that computes its weights itself, such as the eager attention of transformers or
    `nn.MultiheadAttention` with `need_weights=True`, is measured exactly. Fused attention
    (`scaled_dot_product_attention`) shows no logits: only the bound is logged, which ignores masks
    and adds the largest bias. Other attention, and that of a compiled model, is not seen; a warning
    names these modules. With several ranks, the first one's values are logged.

    Args:
        modules: which modules, as for a probe; None for all whose class is called `…Attention…` or
            `…Attn…`, the innermost.
        every: report every N optimizer steps.
    """

    cost = (
        "For a report norms of queries and keys, or three passes over the logits where they are "
        "shown, and one wait for the device; in other steps about two microseconds per call of an "
        "attention module."
    )
    probe_name = "attention_monitor"
    prefix = "attention"
    _results = (*ModuleMonitor._results, "_running", "_compiled")  # noqa: SLF001 - its base

    def __init__(
        self,
        modules: Which | None = None,
        every: PositiveInt = 100,
    ) -> None:
        super().__init__(modules)
        self.every = every
        self._reset_results()

    def _reset_results(self) -> None:
        super()._reset_results()
        self._running: list[AttentionCalls] = []
        self._compiled = False

    def choose(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the attention modules."""
        if self.modules is not None:
            return super().choose(model)
        found = _find_attention(model)
        if not found:
            raise HookConfigError(
                "AttentionMonitor: the model has no module whose class is called …Attention… or "
                "…Attn…. Name them: AttentionMonitor(modules=…)."
            )
        return found

    def before(self, call: Call) -> None:
        """Watch the operations within a module, if its call is measured."""
        if self.is_due(call) and not call.compiled and call.module is not None:
            calls = AttentionCalls()
            calls.start(call.module)
            call.saved = calls
            self._running.append(calls)

    def after(self, call: Call) -> None:
        """Keep what was measured; raise if measuring has failed."""
        calls: AttentionCalls | None = call.saved
        if calls is None:
            if call.compiled:
                self._compiled = True
                self._unseen[call.name] = None
            return
        calls.stop()
        self._running = [one for one in self._running if one is not calls]
        if calls.error is not None:
            raise calls.error
        if values := calls.values:
            self._measured[call.name] = values
        else:
            self._unseen[call.name] = None

    def _stop_watching(self) -> None:
        """Stop watching calls whose end was not seen, such as those that Ctrl-C has ended."""
        while self._running:
            self._running.pop().stop()

    def on_train_start(self) -> None:
        self._stop_watching()
        super().on_train_start()

    def on_train_end(self) -> None:
        self._stop_watching()

    def on_step_end(self, trainer: Any, step: int) -> None:
        self._stop_watching()
        super().on_step_end(trainer, step)

    def _describe_unseen(self, modules: str) -> str:
        why = "they call neither torch's softmax over keys nor its fused attention"
        if self._compiled:
            why = "they are compiled"
        return f"AttentionMonitor saw no attention in {modules}: {why}. They are not measured."


def _find_attention(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with an attention class that contain no other such module."""
    named = {
        place.name: place.module
        for place in module_places(model)
        if "Attention" in type(place.module).__name__ or "Attn" in type(place.module).__name__
    }
    return {
        name: module
        for name, module in named.items()
        if not any(other.startswith(f"{name}." if name else "") for other in named if other != name)
    }


# -- what a module computes with torch's functions: its logits, or a bound of them ----------------


class AttentionCalls(FunctionWatch):
    """Measures softmax and fused attention in one call of a module; nothing is changed.

    A failure of a measurement is kept as `error`, so that the module does not fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self._found: dict[str, Tensor] = {}

    def see(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function; measure it first if it is attention."""
        try:
            if func is _FUSED:
                self._measure_fused(*args, **kwargs)
            elif func in _SOFTMAX:
                self._measure_softmax(*args, **kwargs)
        except Exception as error:
            self.error = error
        return func(*args, **kwargs)

    @property
    def values(self) -> dict[str, Tensor]:
        """The measures by name."""
        found = dict(self._found)
        if "queries" in found:
            found["entropy"] = found["entropy"] / found.pop("queries")
        return found

    def _add(self, **values: Tensor) -> None:
        """Add what was measured to what is known from other calls in the same module."""
        for name, value in values.items():
            known = self._found.get(name)
            if known is not None:
                is_sum = name in ("entropy", "queries")
                value = known + value if is_sum else torch.maximum(known, value)
            self._found[name] = value

    @torch.no_grad()
    def _measure_softmax(self, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        if dim is None or input.ndim < 3 or dim not in (-1, input.ndim - 1):
            return
        if not input.is_floating_point() or input.is_nested or not input.numel():
            return
        queries = input.detach().flatten(0, -2)
        for block in queries.split(max(1, _BLOCK // queries.shape[1])):
            logits = block.float()
            largest = logits.amax(-1)
            # All keys of a query may be masked: it attends to nothing.
            is_masked = largest == -math.inf
            entropy = torch.special.entr(logits.softmax(-1)).sum(-1).masked_fill(is_masked, 0.0)
            self._add(max_logit=largest.amax(), entropy=entropy.sum(), queries=(~is_masked).sum())

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
        """Measure a bound of the logits: the largest norms of queries and keys of each head."""
        if query.is_nested or not query.numel() or not key.numel():
            return
        of_queries, of_keys = (
            torch.linalg.vector_norm(one.detach().float(), dim=-1).amax(-1) for one in (query, key)
        )
        if enable_gqa:
            of_keys = of_keys.repeat_interleave(query.shape[-3] // key.shape[-3], -1)
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        bound = (of_queries * of_keys).amax() * abs(factor)
        if attn_mask is not None and attn_mask.dtype is not torch.bool:  # may be a bias
            bound = bound + attn_mask.detach().float().amax()
        self._add(max_logit_bound=bound)
