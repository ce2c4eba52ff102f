"""Outputs that depend on what they must not see are found, and other mixing is not."""

from __future__ import annotations

import pytest
import torch
from lint_loops import lint_steps
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hookline


class Attention(nn.Module):
    """A language model, or a classifier of texts, with one layer of attention."""

    def __init__(self, *, causal=True, drop=0.0, pooled=False, noise=0.0, right=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 16)
        self.places = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(16, 2 if pooled else 13)
        self.causal, self.pooled, self.noise, self.right = causal, pooled, noise, right

    def allowed(self, ids, attention_mask=None, position_ids=None, doc_ids=None):
        length = ids.shape[1]
        allowed = torch.ones(len(ids), length, length, dtype=torch.bool)
        if self.causal:
            allowed = allowed.tril()
        if attention_mask is not None:
            allowed &= attention_mask[:, None, :].bool()
        if doc_ids is not None:
            allowed &= doc_ids[:, :, None] == doc_ids[:, None, :]
        return allowed | torch.eye(length, dtype=torch.bool)

    def forward(self, ids, attention_mask=None, position_ids=None, doc_ids=None):
        if self.right:  # predicts each token from those before it
            ids = F.pad(ids, (1, 0))[:, :-1]
        places = torch.arange(ids.shape[1])[None] if position_ids is None else position_ids
        x = self.drop(self.embed(ids) + self.places(places))
        q, k, v = self.qkv(x).chunk(3, -1)
        allowed = self.allowed(ids, attention_mask, position_ids, doc_ids)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.noise * torch.randn_like(x)
        if not self.pooled:
            return self.head(x)
        weights = torch.ones(ids.shape) if attention_mask is None else attention_mask
        return self.head((x * weights[..., None]).sum(1) / weights.sum(1, keepdim=True))


class Unmasked(Attention):
    """Forgets the mask of padding and of documents."""

    def allowed(self, ids, *_):
        return super().allowed(ids)


def tokens(step, shape=(4, 12)):
    return torch.randint(1, 13, shape, generator=torch.Generator().manual_seed(step))


def next_token(model, step, **inputs):
    ids = tokens(step)
    return F.cross_entropy(model(ids, **inputs)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# -- output-depends-on-later-token, labels-not-shifted ---------------------------------------------


def test_attention_without_a_causal_mask_is_found_in_the_second_step():
    model = Attention(causal=False, drop=0.1)
    found = lint_steps(model, lambda step: next_token(model, step), 3)
    assert set(found) == {"output-depends-on-later-token"}
    assert found["output-depends-on-later-token"].step == 2
    assert "position 6" in found["output-depends-on-later-token"].message


def test_prediction_of_the_same_token_by_a_causal_model_is_found():
    model = Attention()

    def loss_of(step):
        return F.cross_entropy(model(tokens(step)).flatten(0, 1), tokens(step).flatten())

    found = lint_steps(model, loss_of, 3)
    assert set(found) == {"labels-not-shifted"}
    assert found["labels-not-shifted"].step == 2


@pytest.mark.parametrize("case", ["causal", "masked words", "prefix", "noise", "copy", "right"])
def test_models_that_see_what_they_may_see_are_not_found(case):
    class Prefix(Attention):
        def allowed(self, ids, *_):
            allowed = super().allowed(ids)
            allowed[:, :8, :8] = True
            return allowed

    options = {"causal": case not in ("masked words", "copy"), "right": case == "right"}
    kind = Prefix if case == "prefix" else Attention
    model = kind(**options, noise=0.1 if case == "noise" else 0.0)

    def loss_of(step):
        ids = tokens(step)
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        if case == "prefix":
            labels[:, :7] = -100
        if case == "masked words":
            ids, labels = ids.clone(), ids.clone()
            ids[:, ::3] = 0
            labels[ids != 0] = -100
        if case in ("copy", "right"):
            labels = ids
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

    assert not lint_steps(model, loss_of, 3)


def test_a_decoder_may_see_its_whole_source():
    class Repeats(Attention):
        def forward(self, source, tokens):
            return super().forward(tokens) + self.head(self.embed(source).mean(1, keepdim=True))

    model = Repeats()

    def loss_of(step):
        ids = tokens(step)  # an autoencoder: the source is the text itself
        logits = model(ids[:, :-1], ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    assert not lint_steps(model, loss_of, 3)


def test_active_checks_change_nothing():
    weights = []
    for hooks in ([hookline.Lint()], [hookline.Lint(active=False)], []):
        model = Attention(drop=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        with hookline.attach(model, optimizer, hooks=hooks):
            for step in range(4):
                optimizer.zero_grad()
                next_token(model, step).backward()
                optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


# -- output-depends-on-other-samples ---------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, *, batch_first, pooled=True):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.dim = 1 if pooled else 0

    def forward(self, x):
        return self.head(self.norm(self.layer(x).mean(self.dim)))


def sequences(step, shape=(6, 5, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def test_attention_over_the_batch_is_found_in_the_second_step():
    model = Encoder(batch_first=False)

    def loss_of(step):
        return F.cross_entropy(model(sequences(step)), torch.arange(6) % 3)

    found = lint_steps(model, loss_of, 3)
    assert set(found) == {"output-depends-on-other-samples"}
    assert "other 5 samples" in found["output-depends-on-other-samples"].message


def test_a_softmax_over_the_samples_of_a_loader_is_found():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.head = nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(x * self.gate(x).softmax(0))

    torch.manual_seed(0)
    model, lint = Gated(), hookline.Lint()
    data = DataLoader(TensorDataset(torch.randn(32, 8), torch.arange(32) % 3), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookline.attach(model, optimizer, hooks=[lint]):
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert [finding.check for finding in lint.findings] == ["output-depends-on-other-samples"]


def test_a_model_that_is_random_in_eval_mode_is_not_compared():
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 2)

        def forward(self, ids):
            return self.head(F.dropout(self.embed(ids).mean(1)))

    torch.manual_seed(0)
    model = Random()
    found = lint_steps(model, lambda s: F.cross_entropy(model(tokens(s)), torch.arange(4) % 2), 3)
    assert set(found) == {"dropout-ignores-eval-mode"}


@pytest.mark.parametrize("case", ["batch first", "time first", "graph", "set", "points", "pairs"])
def test_mixing_that_is_meant_is_not_found(case):
    torch.manual_seed(0)
    model = Encoder(batch_first=case == "batch first", pooled=case != "time first")

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x, other):
            if case == "pairs":  # similarities of all pairs, as in contrastive learning
                return self.layer(x) @ self.layer(other).T
            if case == "points":  # each point sees the others of its cloud
                same = (other[:, None] == other[None, :]).float()
                return self.layer(same @ x)
            return self.layer(x + x.mean(0)) if case == "set" else self.layer(other @ x)

    if case in ("graph", "set", "points", "pairs"):
        model = Graph()
    generator = torch.Generator().manual_seed(0)

    def loss_of(step):
        if case in ("batch first", "time first"):
            x = sequences(step) if case == "batch first" else sequences(step, (5, 6, 8))
            return F.cross_entropy(model(x), torch.arange(6) % 3)
        x = torch.randn(6, 8, generator=generator)
        others = {
            "graph": torch.rand(6, 6, generator=generator),
            "set": None,
            "points": torch.tensor([0, 0, 0, 1, 1, 1]),
            "pairs": torch.randn(6, 8, generator=generator),
        }
        outputs = model(x, others[case])
        return F.cross_entropy(outputs, torch.arange(6) % outputs.shape[1])

    assert not lint_steps(model, loss_of, 3)


# -- output-depends-on-padding ---------------------------------------------------------------------


def padded(step):
    ids, mask = tokens(step), torch.ones(4, 12, dtype=torch.long)
    for row in range(3):
        ids[row, 8 + row :], mask[row, 8 + row :] = 0, 0
    return ids, mask


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("kind", [Attention, Unmasked])
def test_padding_that_changes_outputs_is_found(kind, pooled):
    model = kind(causal=False, pooled=pooled)

    def loss_of(step):
        ids, mask = padded(step)
        outputs = model(ids, attention_mask=mask)
        if pooled:
            return F.cross_entropy(outputs, torch.arange(4) % 2)
        return F.cross_entropy(outputs.flatten(0, 1), torch.full((48,), 3))

    found = lint_steps(model, loss_of, 3)
    assert set(found) == ({"output-depends-on-padding"} if kind is Unmasked else set())
    if found:
        assert "what is no padding" in found["output-depends-on-padding"].message


@pytest.mark.parametrize("case", ["causal", "no padding", "other mask", "convolution"])
def test_masks_that_say_nothing_of_padding_are_not_found(case):
    model = Unmasked(causal=case == "causal", pooled=case != "causal")
    if case == "convolution":
        model.conv = nn.Conv1d(16, 16, 3)

    def loss_of(step):
        ids, mask = padded(step)
        if case == "no padding":
            mask = torch.ones_like(mask)
        if case == "other mask":  # words that are to be guessed
            mask = (torch.arange(12) % 4 > 0).long().expand(4, 12)
        outputs = model(ids, attention_mask=mask)
        if case == "causal":
            return F.cross_entropy(outputs[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return F.cross_entropy(outputs, torch.arange(4) % 2)

    assert not lint_steps(model, loss_of, 3)


# -- packed-documents-attend-to-each-other ---------------------------------------------------------

RESTARTING = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, 12)
DOCUMENTS = torch.tensor([0] * 5 + [1] * 7).expand(4, 12)


@pytest.mark.parametrize(
    "inputs", [{"position_ids": RESTARTING}, {"doc_ids": DOCUMENTS}], ids=["positions", "numbers"]
)
def test_packed_documents_that_see_each_other_are_found(inputs):
    model = Unmasked()
    found = lint_steps(model, lambda step: next_token(model, step, **inputs), 3)
    assert set(found) == {"packed-documents-attend-to-each-other"}
    assert found["packed-documents-attend-to-each-other"].subject.split(",")[0] in inputs


@pytest.mark.parametrize("case", ["masked", "one document", "left padding", "no numbers"])
def test_documents_that_are_apart_are_not_found(case):
    model = Attention()
    inputs = {
        "masked": {"position_ids": RESTARTING, "doc_ids": DOCUMENTS},
        "one document": {"position_ids": torch.arange(12).expand(4, 12)},
        "left padding": {
            "position_ids": torch.cat([torch.ones(4).long(), torch.arange(8)]).expand(4, 12),
            "attention_mask": (torch.arange(12) >= 4).long().expand(4, 12),
        },
        "no numbers": {},
    }[case]
    assert not lint_steps(model, lambda step: next_token(model, step, **inputs), 3)
