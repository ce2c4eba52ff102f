"""LogitMonitor: logs the normalizer, entropy and margin of the model's logits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.tensors.nested import describe_structure
from hookline.tensors.sharded import is_sharded

__all__ = ["LogitMonitor"]

log = logging.getLogger("hookline")


class LogitMonitor(BuiltIn):
    """Logs how large and how certain the model's logits are.

    The logits are the model's output, or its `logits`. Each position (a token, a sample) has one
    for each class, and the values are means over positions:

    | value | meaning |
    |---|---|
    | `logits/log_z` | the logarithm of the softmax's normalizer, which a z-loss keeps near zero |
    | `logits/log_z_abs_max` | its largest magnitude |
    | `logits/entropy` | of the predicted distribution, in nats; at most the log of the classes |
    | `logits/margin` | the largest logit minus the second largest |

    A log Z that drifts far from zero precedes instabilities of the output layer, which a z-loss or
    a lower learning rate cures (arXiv 2309.14322). Logits are measured in float32, in the first
    batch of a step. With several ranks each measures its own batch, and the first one's are logged.

    Args:
        log_frequency: report every N optimizer steps.
        class_dim: the dimension of the classes.
        max_positions: measure at most so many positions, evenly spaced.
    """

    cost = (
        "Nothing in steps without a report. A report takes a few passes over the logits of up to "
        "`max_positions` positions, without waiting for the device."
    )
    hookline_group = HookGroup.MONITOR
    hookline_records = True

    def __init__(
        self,
        log_frequency: PositiveInt = 50,
        class_dim: int = -1,
        max_positions: PositiveInt = 256,
    ) -> None:
        self.log_frequency = log_frequency
        self.class_dim = class_dim
        self.max_positions = max_positions
        self._values: dict[str, Tensor] = {}
        self._warned = False

    def on_train_start(self) -> None:
        """Forget what was measured before."""
        self._values = {}

    def on_after_forward(self, outputs: Any, step: int) -> None:
        """Measure the logits of a step's first batch, without waiting for the device."""
        if (step + 1) % self.log_frequency or self._values:
            return
        logits = _find_logits(outputs)
        if logits is None or not logits.numel() or logits.shape[self._dim(logits)] < 2:
            if not self._warned:
                self._warned = True
                log.warning(
                    "LogitMonitor found no logits in the model's output, %s. Expected a tensor "
                    "with two or more classes, or `logits` that are one.",
                    describe_structure(outputs),
                )
            return
        self._values = self._measure(logits)

    def on_step_end(self, trainer: Any) -> None:
        """Log what was measured."""
        if self._values:
            values, self._values = self._values, {}
            for name, value in values.items():
                trainer.log(f"logits/{name}", value)

    def _dim(self, logits: Tensor) -> int:
        dim = self.class_dim
        return dim if -logits.ndim <= dim < logits.ndim else -1

    @torch.no_grad()
    def _measure(self, logits: Tensor) -> dict[str, Tensor]:
        rows = logits.detach().movedim(self._dim(logits), -1)
        rows = rows.reshape(-1, rows.shape[-1])
        stride = -(-len(rows) // self.max_positions)
        rows = rows[::stride].float()
        log_z = rows.logsumexp(-1)
        entropy = torch.special.entr((rows - log_z[:, None]).exp_()).sum(-1)
        largest = rows.topk(2, dim=-1).values
        return {
            "log_z": log_z.mean(),
            "log_z_abs_max": log_z.abs().amax(),
            "entropy": entropy.mean(),
            "margin": (largest[:, 0] - largest[:, 1]).mean(),
        }


def _find_logits(outputs: Any) -> Tensor | None:
    """Return the logits in a model's output: itself, `logits`, or the first of a tuple."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    elif not isinstance(outputs, Tensor):
        first = outputs[0] if isinstance(outputs, tuple | list) and outputs else None
        outputs = getattr(outputs, "logits", first)
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or is_sharded(outputs):
        return None
    return outputs if outputs.ndim >= 2 else None
