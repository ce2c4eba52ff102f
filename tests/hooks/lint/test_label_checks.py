"""Labels that a loss does not expect are found, and unusual ones that are right are not."""

from __future__ import annotations

import pytest
import torch
from lint_loops import lint_steps
from torch import nn
from torch.nn import functional as F


def linear(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def inputs(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def classes(count, step=0, shape=(12,)):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(step))


# -- target-broadcast ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_column_against_a_row_of_labels_is_found_at_once(name):
    model = linear()

    def loss_of(step):
        return getattr(F, name)(model(inputs(step)), torch.ones(12))

    found = lint_steps(model, loss_of, 1)
    assert set(found) == {"target-broadcast"}
    assert found["target-broadcast"].step == 1
    assert "(12, 1)" in found["target-broadcast"].message


@pytest.mark.parametrize("power", [lambda d: (d**2).mean(), lambda d: d.abs().mean()])
def test_a_loss_written_by_hand_that_broadcasts_is_found(power):
    model = linear()
    found = lint_steps(model, lambda step: power(model(inputs(step)) - torch.ones(12)), 1)
    assert set(found) == {"target-broadcast"}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "loss",
    [
        lambda out: F.mse_loss(out.squeeze(1), torch.ones(12)),
        lambda out: ((out - torch.ones(12, 1)) ** 2).mean(),
        lambda out: F.mse_loss(out, torch.ones(1)),  # one label for all
        lambda out: F.mse_loss(out, torch.tensor(1.0)),
        lambda out: ((out - 1) ** 2).mean(),
        lambda out: ((out - out.T) ** 2).mean(),  # all pairs
        # quantile regression: each quantile with each sample of the target
        lambda out: F.smooth_l1_loss(
            out.view(3, 4, 1), torch.ones(3, 1, 4), reduction="none"
        ).mean(),
    ],
)
def test_shapes_that_belong_together_are_not_found(loss):
    model = linear()
    assert not lint_steps(model, lambda step: loss(model(inputs(step))), 3)


# -- all-labels-ignored ----------------------------------------------------------------------------


def test_ignored_labels_are_found_in_the_second_step():
    model = linear(3)
    labels = torch.full((12,), -100)

    def loss_of(step):
        return F.cross_entropy(model(inputs(step)), labels, reduction="sum")

    found = lint_steps(model, loss_of, only=["all-labels-ignored"])
    assert found["all-labels-ignored"].step == 2
    assert "All 12 labels" in found["all-labels-ignored"].message


@pytest.mark.parametrize("case", ["one batch", "one head", "other index", "soft"])
def test_labels_of_which_some_are_used_are_not_found(case):
    model = linear(3)
    none = torch.full((12,), -100)

    def loss_of(step):
        out = model(inputs(step))
        if case == "one batch":
            labels = none if step == 1 else classes(3)
            return F.cross_entropy(out, labels, reduction="sum")
        if case == "one head":
            return F.cross_entropy(out, classes(3)) + F.cross_entropy(out, none, reduction="sum")
        if case == "soft":
            return F.cross_entropy(out, torch.zeros(12, 3))
        labels = torch.zeros(12, dtype=torch.long)
        return F.cross_entropy(out, labels, ignore_index=1)

    assert not lint_steps(model, loss_of, 5)


# -- probabilities and logits ----------------------------------------------------------------------

BAD = {
    "softmax": (3, lambda o, y: F.cross_entropy(o.softmax(1), y)),
    "softmax module": (3, lambda o, y: nn.CrossEntropyLoss()(nn.Softmax(dim=-1)(o), y)),
    "softmax of pixels": (
        3,
        lambda o, y: F.cross_entropy(o.view(4, 3, 3).softmax(1), torch.zeros(4, 3).long()),
    ),
    "sigmoid": (3, lambda o, y: F.cross_entropy(o.sigmoid(), y)),
    "nll of logits": (3, lambda o, y: F.nll_loss(o, y)),
    "nll of probabilities": (3, lambda o, y: nn.NLLLoss()(o.softmax(1), y)),
    "kl": (3, lambda o, y: F.kl_div(o.softmax(1), torch.full((12, 3), 1 / 3))),
    "bce": (
        3,
        lambda o, y: F.binary_cross_entropy_with_logits(o.sigmoid(), F.one_hot(y, 3).float()),
    ),
    "bce squeezed": (
        1,
        lambda o, y: F.binary_cross_entropy_with_logits(o.sigmoid().squeeze(1), torch.ones(12)),
    ),
}
IDS = {
    "n": "nll-without-log-probabilities",
    "k": "nll-without-log-probabilities",
    "s": "probabilities-into-cross-entropy",
    "b": "probabilities-into-cross-entropy",
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", BAD)
def test_a_loss_on_the_wrong_kind_of_outputs_is_found_in_the_first_step(name):
    count, loss = BAD[name]
    model = linear(count)
    found = lint_steps(model, lambda step: loss(model(inputs(step)), classes(3, step)), 1)
    assert set(found) == {IDS[name[0]]}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: F.cross_entropy(o, y),
        lambda o, y: F.cross_entropy(o.log_softmax(1), y),
        lambda o, y: F.cross_entropy(o, F.one_hot(y, 3).float(), label_smoothing=0.1),
        lambda o, y: F.cross_entropy(o.sigmoid() * 20, y),  # bounded logits, on purpose
        lambda o, y: F.nll_loss(o.log_softmax(1), y),
        lambda o, y: F.nll_loss((o.softmax(1) + 1e-8).log(), y),
        lambda o, y: F.nll_loss(o.log_softmax(1)[:, 1:], (y - 1).clamp(0)),  # some of the classes
        lambda o, y: F.nll_loss(o, y, reduction="none").mean(),  # picks elements
        lambda o, y: F.kl_div(o.log_softmax(1), torch.full((12, 3), 1 / 3)),
        lambda o, y: F.binary_cross_entropy(o.sigmoid(), F.one_hot(y, 3).float()),
        lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, 3).float()),
        lambda o, y: F.cross_entropy(F.normalize(o) @ F.normalize(o).T / 0.07, torch.arange(12)),
    ],
)
def test_losses_on_the_right_kind_of_outputs_are_not_found(loss):
    model = linear(3)
    assert not lint_steps(model, lambda step: loss(model(inputs(step)), classes(3, step)), 6)


# -- language models -------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self, size=11):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(size, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, size)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def next_token_loss(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def test_labels_shifted_twice_are_found_in_the_first_step():
    model = Tokens()

    def loss_of(step):
        tokens = classes(11, step, (3, 12))
        data, labels = tokens[:, :-1], tokens[:, 1:]
        return next_token_loss(model(data)[:, :-1], labels[:, 1:])

    found = lint_steps(model, loss_of, 1)
    assert set(found) == {"labels-shifted-twice"}


@pytest.mark.parametrize("case", ["data", "model", "several tokens", "period", "masked"])
def test_labels_shifted_once_are_not_found(case):
    model = Tokens()

    def loss_of(step):
        tokens = classes(11, step, (3, 12))
        if case == "model":
            return next_token_loss(model(tokens)[:, :-1], tokens[:, 1:])
        if case == "several tokens":
            first = next_token_loss(model(tokens)[:, :-1], tokens[:, 1:])
            return first + next_token_loss(model(tokens)[:, :-2], tokens[:, 2:])
        if case == "period":
            tokens = torch.tensor([[1, 2] * 6] * 3)
        labels = tokens[:, 1:].clone()
        if case == "masked":
            labels[:, :6] = -100
        return next_token_loss(model(tokens[:, :-1]), labels)

    assert not lint_steps(model, loss_of, 3)


def padded(step, *, end, pad, fixed=False):
    """Return four texts of tokens from 3 on, with an end token and padding."""
    lengths = [3 + (step + i) % 4 for i in range(4)]
    width = 9 if fixed else max(lengths) + 1
    tokens = torch.full((4, width), pad)
    for row, length in enumerate(lengths):
        tokens[row, :length] = 3 + classes(8, 10 * step + row, (length,))
        tokens[row, length] = end
    return tokens


@pytest.mark.parametrize("by_index", [False, True])
def test_an_end_token_that_is_masked_as_padding_is_found(by_index):
    model = Tokens()

    def loss_of(step):
        tokens = padded(step, end=1, pad=1)
        labels = tokens[:, 1:]
        if by_index:
            return next_token_loss(model(tokens)[:, :-1], labels, ignore_index=1)
        return next_token_loss(model(tokens)[:, :-1], labels.masked_fill(labels == 1, -100))

    found = lint_steps(model, loss_of)
    assert set(found) == {"end-token-never-trained"}
    assert found["end-token-never-trained"].step == 3
    assert "token 1" in found["end-token-never-trained"].message


@pytest.mark.parametrize("case", ["own padding", "first end kept", "fixed width", "no end"])
def test_padding_that_is_right_is_not_found(case):
    model = Tokens()

    def loss_of(step):
        if case == "first end kept":
            tokens = padded(step, end=1, pad=1)
            labels = tokens[:, 1:].clone()
            is_repeated = (labels == 1) & (tokens[:, :-1] == 1)
            labels[is_repeated] = -100
        else:
            end = 2 if case == "own padding" else 1
            tokens = padded(step, end=end, pad=1, fixed=case == "fixed width")
            if case == "no end":
                tokens = tokens[:, :-1]  # dynamic padding: the longest text has none
            labels = tokens[:, 1:].masked_fill(tokens[:, 1:] == 1, -100)
        return next_token_loss(model(tokens)[:, :-1], labels)

    assert not lint_steps(model, loss_of, 8)


# -- first-loss-too-high ---------------------------------------------------------------------------


def test_a_last_layer_with_large_weights_is_found_in_the_first_step():
    model = Tokens()
    nn.init.normal_(model.head.weight, std=20.0)

    def loss_of(step):
        tokens = classes(11, step, (3, 12))
        return next_token_loss(model(tokens)[:, :-1], tokens[:, 1:])

    found = lint_steps(model, loss_of, 1)
    assert set(found) == {"first-loss-too-high"}
    assert found["first-loss-too-high"].subject == "head"
    assert found["first-loss-too-high"].severity == "warning"


@pytest.mark.parametrize("case", ["usual", "data", "margin", "later"])
def test_first_losses_that_are_high_for_another_reason_are_not_found(case):
    model = linear(5)
    if case == "later":
        nn.init.normal_(model[2].weight, std=20.0)

    def loss_of(step):
        x = inputs(step) * (100 if case == "data" else 1)
        if case == "later" and step == 0:
            return model(x).sum() * 0
        scale = 64 if case == "margin" else 1
        return F.cross_entropy(model(x) * scale if scale > 1 else model(x), classes(5, step))

    assert not lint_steps(model, loss_of, 3)
