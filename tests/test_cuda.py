"""Tests that need CUDA. They are left out without it, and have not been run on it yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Net, config
from rank_checks import run_ranks
from torch.nn import functional as F

import hookline
from hookline.checkpoint import load_checkpoint
from hookline.checkpoint.snapshot import TensorBuffer

pytestmark = pytest.mark.gpu


class Watch(hookline.Hook):
    """Gets numbers as built-in hooks do: it does not read them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, loss: hookline.LazyFloat, grad_norm: hookline.LazyFloat) -> None:
        self.seen = [loss, grad_norm]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error if the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def batches(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 8).cuda(), torch.randn(4, 4).cuda()) for _ in range(n)]


def test_a_save_copies_into_pinned_memory_and_loads_exactly(tmp_path: Path) -> None:
    model, _ = make()
    buffer = TensorBuffer()
    buffer.reserve(model.state_dict(), {})
    assert buffer._memory.is_pinned()
    trainer = hookline.Trainer(config(epochs=1), *make(), loss_fn=F.mse_loss)
    trainer.fit(batches(2))
    path = trainer.save_checkpoint(tmp_path / "saved")
    assert path is not None
    for name, value in load_checkpoint(path).model.items():
        assert torch.equal(value, trainer.model.state_dict()[name].cpu())


def test_a_bare_loop_with_hooks_does_not_wait_for_the_device() -> None:
    model, optimizer = make()
    hook, data = Watch(), batches(4)
    with hookline.attach(model, optimizer, hooks=[hook, hookline.EMA()]):
        for step, (inputs, targets) in enumerate(data):
            # The first steps check and allocate.
            with no_waiting() if step > 1 else nullcontext():
                F.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert all(float(value) > 0 for value in hook.seen)


def test_the_trainer_with_hooks_does_not_wait_for_the_device() -> None:
    class Guard(hookline.Hook):
        """Forbids waiting from the end of the second step to that of the fourth."""

        intervenes = True

        def on_step_end(self, step: int) -> None:
            if step == 2:
                torch.cuda.set_sync_debug_mode("error")
            if step == 4:
                torch.cuda.set_sync_debug_mode("default")

    hook = Watch()
    trainer = hookline.Trainer(
        config(epochs=1), *make(), loss_fn=F.mse_loss, hooks=[hook, Guard(), hookline.EMA()]
    )
    try:
        trainer.fit(batches(5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.step == 5
    assert all(float(value) > 0 for value in hook.seen)


@pytest.mark.gpu(devices=2)
def test_two_ranks_with_nccl_have_the_numbers_of_one(tmp_path: Path) -> None:
    assert run_ranks("distributed_cuda.py", tmp_path, "cuda").count("fine") == 2
