"""AttentionMonitor: logs the largest attention logit and the entropy of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveInt
from torch import nn

from hookline.errors import HookConfigError
from hookline.hooks.monitoring.attention_calls import AttentionCalls
from hookline.hooks.monitoring.module_monitor import ModuleMonitor
from hookline.probes.call import Call
from hookline.probes.module_selection import Which
from hookline.tensors.name_patterns import module_places

__all__ = ["AttentionMonitor"]


class AttentionMonitor(ModuleMonitor):
    """Logs the largest attention logit, and the entropy of the attention weights.

    The values are `attention/<module>/<measure>`, of a module's first call in a step:

    | measure | meaning |
    |---|---|
    | `max_logit` | the largest logit that enters the softmax, over all heads |
    | `entropy` | of the attention weights before dropout, in nats, the mean over heads |
    | `max_logit_bound` | no logit is larger: the largest norms of queries and keys, multiplied |

    The logits are those after scaling, masks and biases. A query whose keys are all masked has no
    entropy. Logits that grow without end make attention collapse to single tokens, and training
    diverge (arXiv 2309.14322, which cures it with a norm of queries and keys).

    A module that computes its weights itself, such as the eager attention of transformers or
    `nn.MultiheadAttention` with `need_weights=True`, is measured exactly. Fused attention
    (`scaled_dot_product_attention`) shows no logits: only the bound is logged, which ignores masks
    and adds the largest bias, or with `recompute=True` the logits are computed once more, block by
    block, in float32. Attention that neither torch's softmax nor its fused function computes is not
    seen, nor is that of a compiled model; a warning names these modules. A recomputation by
    activation checkpointing is not measured. With several ranks each measures its own batch, and
    the first one's are logged.

    Args:
        modules: which modules: names, globs, regular expressions, types, predicates, or modules
            themselves; None for all whose class is called `…Attention…` or `…Attn…`, the innermost.
        log_frequency: report every N optimizer steps.
        per_head: log each head, too, as `attention/<module>/head_<i>/<measure>`.
        recompute: compute the logits of fused attention once more, for exact values.
    """

    cost = (
        "In the first batch of a step with a report, norms of queries and keys (which "
        "`nn.MultiheadAttention` does not show: they are computed once more), or three passes "
        "over the logits where they are shown, and one wait for the device; in other steps about "
        "two microseconds per call of an attention module. `recompute` is about another forward of "
        "the attention."
    )
    probe_name = "attention_monitor"
    prefix = "attention"
    _results = (*ModuleMonitor._results, "_running", "_compiled")  # noqa: SLF001 - its base

    def __init__(
        self,
        modules: Which | None = None,
        log_frequency: PositiveInt = 100,
        *,
        per_head: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__(modules)
        self.log_frequency = log_frequency
        self.per_head = per_head
        self.recompute = recompute
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
            calls = AttentionCalls(_heads_of(call.module), recompute=self.recompute)
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
        if values := calls.statistics.values:
            self._measured[call.name] = values
        else:
            self._unseen[call.name] = None

    def _stop_watching(self) -> None:
        """Stop watching calls whose end was not seen, such as those that Ctrl-C has ended."""
        while self._running:
            self._running.pop().stop()

    def on_train_start(self) -> None:
        """Forget what was measured before."""
        self._stop_watching()
        super().on_train_start()

    def on_train_end(self) -> None:
        """Stop watching a call that was interrupted."""
        self._stop_watching()

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Read all measurements at once, and log them."""
        self._stop_watching()
        super().on_step_end(trainer, step)

    def _summarize(self, values: Mapping[str, list[float]]) -> dict[str, float]:
        """Return the values of all heads together, and of each."""
        found: dict[str, float] = {}
        for measure, heads in values.items():
            found[measure] = sum(heads) / len(heads) if measure == "entropy" else max(heads)
        if self.per_head:
            for measure, heads in values.items():
                found |= {f"head_{i}/{measure}": value for i, value in enumerate(heads)}
        return found

    def _describe_unseen(self, modules: str) -> str:
        why = "they call neither torch's softmax over keys nor its fused attention"
        if self._compiled:
            why = "they are compiled"
        return f"AttentionMonitor saw no attention in {modules}: {why}. They are not measured."


def _heads_of(module: nn.Module | None) -> int | None:
    """Return the number of a module's heads, where an attribute has it."""
    for name in ("num_heads", "num_attention_heads", "n_head", "n_heads"):
        heads = getattr(module, name, None)
        if isinstance(heads, int) and heads > 0:
            return heads
    return None


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
