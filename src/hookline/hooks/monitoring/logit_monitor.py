"""LogitMonitor: logs the normalizer, entropy and margin of the model's logits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from pydantic import PositiveInt
from torch import Tensor

from hookline.hooks.monitoring.monitor_bases import TrainingMonitor
from hookline.tensors.nested import describe_structure
from hookline.tensors.sharded import is_sharded

log = logging.getLogger("hookline")


class LogitMonitor(TrainingMonitor):
    """Logs how large and how certain the model's logits are.

    The logits are the model's output, its `logits`, or the first tensor with two or more dimensions
    of a tuple. Each position (a token, a sample) has one for each class, and the values are means
    over positions:

    | value | meaning |
    |---|---|
    | `logits/log_z` | the logarithm of the softmax's normalizer, which a z-loss keeps near zero |
    | `logits/log_z_abs_max` | its largest magnitude |
    | `logits/entropy` | of the predicted distribution, in nats; at most the log of the classes |
    | `logits/margin` | the largest logit minus the second largest |

    A log Z that drifts far from zero precedes instabilities of the output layer, which a z-loss or
    a lower learning rate cures (arXiv 2309.14322). The first batch of a step is measured; with
    several ranks, the first one's values are logged. All positions and classes count, also padding
    that the loss ignores.

    Args:
        every: report every N optimizer steps.
        class_dim: the dimension of the classes; None: the second one of outputs with four or more
            dimensions, such as those for the pixels of images, and the last one of others.
        max_positions: measure at most so many positions, evenly spaced.
    """

    every_name = "log_frequency"
    cost = (
        "Only for a report: a few passes over the logits of up to `max_positions` positions, "
        "without waiting for the device."
    )

    def __init__(
        self,
        every: PositiveInt = 50,
        class_dim: int | None = None,
        max_positions: PositiveInt = 256,
    ) -> None:
        self.every = every
        self.class_dim = class_dim
        self.max_positions = max_positions
        self._values: dict[str, Tensor] = {}
        self._step: int | None = None
        self._warned = False

    def on_train_start(self) -> None:
        self._values, self._step = {}, None

    def on_after_forward(self, outputs: Any, step: int) -> None:
        if (step + 1) % self.every or self._step == step:
            return
        self._values, self._step = {}, step
        logits = _find_logits(outputs)
        dim = None if logits is None else self._dim(logits)
        if logits is None or dim is None or not logits.numel() or logits.shape[dim] < 2:
            self._warn(outputs)
            return
        self._values = self._measure(logits, dim)

    def on_step_end(self, trainer: Any, step: int) -> None:
        values, self._values = self._values, {}
        if values and self._step in (step - 1, step):  # a skipped step does not count
            for name, value in values.items():
                trainer.log(f"logits/{name}", value)

    def _dim(self, logits: Tensor) -> int | None:
        """Return the dimension of the classes; None if these logits do not have it."""
        if self.class_dim is None:
            return 1 if logits.ndim > 3 else -1
        return self.class_dim if -logits.ndim <= self.class_dim < logits.ndim else None

    def _warn(self, outputs: Any) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "LogitMonitor found no logits in the model's output, %s. Expected a tensor with "
                "two or more classes along class_dim=%s, or `logits` that are one.",
                *(describe_structure(outputs), self.class_dim),
            )

    @torch.no_grad()
    def _measure(self, logits: Tensor, dim: int) -> dict[str, Tensor]:
        rows = logits.detach().movedim(dim, -1)
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
    """Return the logits in a model's output: itself, its `logits`, or the first of a tuple."""
    if isinstance(outputs, Tensor):
        return outputs if _may_be_logits(outputs) else None
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    else:
        found = getattr(outputs, "logits", None)
        if found is None and isinstance(outputs, tuple | list):
            found = next((one for one in outputs if _may_be_logits(one)), None)
    return found if _may_be_logits(found) else None


def _may_be_logits(value: Any) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.ndim >= 2
        and value.layout is torch.strided
        and not (value.is_nested or is_sharded(value))
    )
