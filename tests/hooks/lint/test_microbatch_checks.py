"""A mean of means over micro-batches is found, and right or harmless weights are not."""

from __future__ import annotations

import pytest
import torch
from lint_loops import assert_none_failed
from torch import nn
from torch.nn import functional as F

import hookline

COUNTS = (20, 6, 14, 9)


def batch(seed, count, padding):
    generator = torch.Generator().manual_seed(seed)
    size = count + padding
    x, y = torch.randn(size, 8, generator=generator), torch.arange(size) % 3
    y[count:] = -100
    return x, y


def train_micro(loss_of, counts=COUNTS, width=24, steps=3):
    """Train with a micro-batch for each count; `loss_of` gets logits, labels, count and total."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    lint = hookline.Lint()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hookline.attach(model, optimizer, hooks=[lint]):
        for step in range(steps):
            optimizer.zero_grad()
            for i, count in enumerate(counts):
                x, y = batch(100 * step + i, count, max(width - count, 0))
                loss_of(model(x), y, count, sum(counts)).backward()
            optimizer.step()
    assert_none_failed(lint)
    return lint.findings


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda o, y, n, total: F.cross_entropy(o, y) / 4,
        lambda o, y, n, total: F.cross_entropy(o, y) * 1024 / 4,  # a scaler's scale
        lambda o, y, n, total: F.cross_entropy(o, y, reduction="sum") / n / 4,
        lambda o, y, n, total: F.cross_entropy(o, y),
    ],
)
def test_equal_weights_of_means_over_different_numbers_are_found_in_the_first_step(loss_of):
    (finding,) = train_micro(loss_of)
    assert finding.check == "mean-of-means"
    assert finding.step == 1
    assert "20, 6, 14, 9" in finding.message


def test_sequences_of_different_lengths_without_padding_are_found():
    (finding,) = train_micro(lambda o, y, n, total: F.cross_entropy(o, y) / 4, width=0)
    assert finding.check == "mean-of-means"
    assert finding.step == 2


@pytest.mark.parametrize(
    ("loss_of", "counts", "width"),
    [
        (lambda o, y, n, total: F.cross_entropy(o, y) * n / total, COUNTS, 24),
        (lambda o, y, n, total: F.cross_entropy(o, y, reduction="sum") / total, COUNTS, 24),
        (lambda o, y, n, total: F.cross_entropy(o, y, reduction="none").sum() / total, COUNTS, 24),
        (lambda o, y, n, total: F.cross_entropy(o, y) / 4, (24, 24, 24, 24), 24),
        (lambda o, y, n, total: F.cross_entropy(o, y) / 4, (20, 19, 21, 20), 24),  # masked words
        (lambda o, y, n, total: F.cross_entropy(o, y) / 4, (16, 16, 16, 3), 0),  # the last batch
        (lambda o, y, n, total: F.cross_entropy(o, y), (5,), 24),
        # several losses in one backward, or another term, say nothing for sure
        (lambda o, y, n, t: F.cross_entropy(o, y) / 4 + F.mse_loss(o, o * 0), COUNTS, 24),
        (lambda o, y, n, t: F.cross_entropy(o, y) / 4 + 0.01 * o.square().mean(), COUNTS, 24),
    ],
)
def test_weights_that_are_right_or_cannot_be_known_are_not_found(loss_of, counts, width):
    assert not train_micro(loss_of, counts, width, steps=4)


def test_different_tasks_in_turn_are_not_found():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 5)])
    lint = hookline.Lint()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hookline.attach(model, optimizer, hooks=[lint]):
        for step in range(4):
            optimizer.zero_grad()
            for i, count in enumerate((20, 4)):
                x, y = batch(step, count, 24 - count)
                F.cross_entropy(model[i](x), y).backward()
            optimizer.step()
    assert not lint.findings
