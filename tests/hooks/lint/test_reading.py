"""Lint waits for the device once in a step that it looks at, at its end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline.hooks.lint import training_view
from hookline.hooks.lint.training_view import TrainingView

WAITS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")
"""Operations that need a number from the device; `.item()` and `bool(x)` are the first one."""


FOLDER = str(Path(training_view.__file__).parent)
REPLACED = ("watched", "run_backward")  # these call functions of torch for the script


def _is_lint(code: Any) -> bool:
    return code.co_filename.startswith(FOLDER) and code.co_name not in REPLACED


class Waits(TorchDispatchMode):
    """Counts the operations that would wait for an accelerator, by where Lint is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITS:
            frame: Any = sys._getframe(1)
            while frame is not None and not _is_lint(frame.f_code):
                frame = frame.f_back
            if frame is not None:
                self.seen[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1
        return func(*args, **(kwargs or {}))


class Text(nn.Module):
    """A small language model with what checks look at: dropout, BatchNorm, experts, LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.embed(ids), is_causal=True, src_mask=_mask(ids))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        weights = self.router(x).softmax(-1)
        x = x + sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        return self.head(x)


def _mask(ids: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(ids.shape[1])


def train_text(model: nn.Module, batch: Any) -> Tensor:
    (ids,) = batch
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train_image(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def text() -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    return Text(), TensorDataset(torch.randint(0, 20, (48, 8))), train_text


def image() -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten()),
        nn.Linear(8 * 36, 4),
    )
    return model, TensorDataset(torch.randn(48, 3, 8, 8), torch.randint(0, 4, (48,))), train_image


@pytest.mark.parametrize("make", [text, image])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_check_waits_for_the_device_within_a_step(
    make: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, data, loss_of = make()
    data = TensorDataset(*(x.to(dtype) if x.is_floating_point() else x for x in data.tensors))
    model = model.to(dtype)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    optimizer.load_state_dict(optimizer.state_dict())
    lint, waits, reads = hookline.Lint(active=False), Waits(), Counter[int]()
    settle = TrainingView.settle

    def settle_unseen(view: TrainingView, guard: Any) -> None:
        reads[view.steps_seen] += 1
        with torch.utils._python_dispatch._disable_current_modes():
            settle(view, guard)

    monkeypatch.setattr(TrainingView, "settle", settle_unseen)
    with hookline.attach(model, optimizer, hooks=[lint]) as session, waits:
        for _ in range(2):
            for batch in DataLoader(data, batch_size=8, shuffle=True):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                average.update_parameters(model)
            model.eval()
            with torch.no_grad(), session.validation():
                loss_of(model, batch)
            model.train()
    assert dict(waits.seen) == {}
    assert set(reads.values()) <= {1, 2}  # twice in the last step, as training ends
    assert not any(why.startswith("it failed (") for why in lint.left_out.values())
