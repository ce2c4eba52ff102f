"""A loop that is written by hand with Accelerate, in one process or started by `accelerate launch`.

Usage: accelerated_loop.py FOLDER. Each rank writes what its hooks have seen as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from loops import batches, make
from torch.nn import functional as F

import hookline


class Watch(hookline.Hook):
    """Records the events of steps, and their numbers."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.norms: list[float] = []
        self.losses: list[float] = []

    def on_train_start(self) -> None:
        self.events.append("train_start")

    def on_gradients_ready(self) -> None:
        self.events.append("gradients_ready")

    def on_gradient_clip(self, grad_norm: float) -> None:
        self.events.append("gradient_clip")

    def on_step_end(self, step: int, grad_norm: float, loss: float) -> None:
        self.events.append(f"step_end {step}")
        self.norms.append(grad_norm)
        self.losses.append(loss)

    def on_epoch_end(self) -> None:
        self.events.append("epoch_end")

    def on_train_end(self) -> None:
        self.events.append("train_end")


def run(accumulate: int, runs: Path | None, *, has_hooks: bool = True) -> dict[str, Any]:
    """Train an epoch of eight batches; return what the hook has seen, and the weights."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, optimizer = make()
    model.drop.p = 0.0  # one process would draw other numbers than two
    data = [(x, y) for xs, ys in batches(8) for x, y in zip(xs, ys, strict=True)]
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch = Watch()

    def train() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

    if has_hooks:
        options: Any = {"model": model, "optimizer": optimizer, "runs": runs}
        hooks = [watch, hookline.GradientMonitor(1)]
        with hookline.attach(accelerator, hooks=hooks, **options) as session, session.epoch():
            train()
    else:
        train()
    weights = accelerator.unwrap_model(model).state_dict()
    return {**vars(watch), "weights": {name: value.tolist() for name, value in weights.items()}}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {"watched": run(1, folder / "two"), "plain": run(1, None, has_hooks=False)}
    accelerator = Accelerator(cpu=True)
    (folder / f"rank-{accelerator.process_index}.json").write_text(json.dumps(results))
    accelerator.end_training()
