"""Wrong modes and weights in training and evaluation are found, and modes on purpose are not."""

from __future__ import annotations

import copy

import pytest
import torch
from lint_loops import assert_none_failed
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hookline


def classifier(middle=None):
    torch.manual_seed(0)
    middle = nn.Dropout(0.2) if middle is None else middle
    return nn.Sequential(nn.Linear(8, 16), middle, nn.ReLU(), nn.Linear(16, 3))


def data(seed, count=6):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(count) % 3


def train(model, *, evaluate=None, before=None, steps=6, every=2, parameters=None, wrap=None):
    """Train, and call `evaluate(model)` after every second step; return the findings."""
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)
    lint = hookline.Lint()
    with hookline.attach(model, optimizer, hooks=[lint]):
        for step in range(steps):
            if before is not None:
                before(model)
            x, y = data(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if wrap is not None:
                wrap(model)
            if evaluate is not None and step % every == every - 1:
                evaluate(model)
    assert_none_failed(lint)
    return lint.findings


def losses(model, count=3):
    return [F.cross_entropy(model(x), y) for x, y in (data(900 + i) for i in range(count))]


# -- training-in-eval-mode -------------------------------------------------------------------------


@pytest.mark.parametrize("no_grad", [True, False])
@pytest.mark.parametrize("middle", [nn.Dropout(0.2), nn.BatchNorm1d(16)])
def test_a_model_that_stays_in_eval_mode_is_found_in_the_next_step(middle, no_grad):
    def evaluate(model):
        model.eval()
        with torch.set_grad_enabled(not no_grad):
            losses(model)

    (finding,) = train(classifier(middle), evaluate=evaluate)
    assert finding.check == "training-in-eval-mode"
    assert finding.step == 3
    assert finding.subject == "the model"


@pytest.mark.parametrize("case", ["restored", "no dropout", "frozen batch norm", "attack", "later"])
def test_modes_on_purpose_are_not_found(case):
    model = classifier({"no dropout": nn.Identity()}.get(case, nn.BatchNorm1d(16)))

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            losses(model)
        if case != "no dropout":
            model.train()
        if case == "frozen batch norm":
            model[1].eval()

    def attack(model):
        model.eval()
        x, y = data(1)
        F.cross_entropy(model(x.requires_grad_()), y).backward()
        model.train()

    before = attack if case == "attack" else None
    if case == "later":  # the last stage runs with the statistics that there are
        assert not train(model, steps=6, wrap=lambda model: model.eval())
        return
    assert not train(model, evaluate=evaluate, before=before)


def test_training_in_eval_mode_from_the_start_is_found_in_the_first_step():
    (finding,) = train(classifier().eval())
    assert finding.check == "training-in-eval-mode"
    assert finding.step == 1
    assert finding.severity == "warning"


@pytest.mark.parametrize("case", ["frozen", "no dropout", "only the head", "batch norm"])
def test_training_in_eval_mode_that_may_be_meant_is_not_found(case):
    middle = {"no dropout": nn.Dropout(0.0), "batch norm": nn.BatchNorm1d(16)}.get(case)
    model = classifier(middle).eval()
    parameters = None
    if case == "frozen":
        model[0].requires_grad_(requires_grad=False)
    if case == "only the head":
        parameters = list(model[3].parameters())
    assert not train(model, parameters=parameters)


# -- dropout-in-evaluation -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("make", [classifier, lambda: classifier(nn.BatchNorm1d(16))])
def test_an_evaluation_in_train_mode_is_found(make, count):
    def evaluate(model):
        with torch.no_grad():
            losses(model, count)

    (finding,) = train(make(), evaluate=evaluate, steps=4)
    assert finding.check == "dropout-in-evaluation"
    assert finding.step == 3
    assert f"{count} batches" in finding.message
    assert finding.subject == "1"


def test_an_evaluation_of_a_part_of_the_outputs_is_found():
    x, y = data(7, 12)  # as of a graph, with the same inputs in training and evaluation

    def evaluate(model):
        with torch.no_grad():
            F.cross_entropy(model(x)[y > 0].float(), y[y > 0])

    (finding,) = train(classifier(), evaluate=evaluate, steps=3)
    assert finding.check == "dropout-in-evaluation"


def in_eval(model):
    model.eval()
    losses(model)
    model.train()


def monte_carlo(model):
    x, y = data(900)
    for _ in range(5):
        F.cross_entropy(model(x), y)


def monte_carlo_by_modules(model):
    model.eval()
    model[1].train()
    losses(model)
    model.train()


def training_metric(model):
    x, y = data(900)
    with torch.enable_grad():
        outputs = model(x)
    F.cross_entropy(outputs.detach(), y)


def pseudo_labels(model):
    x, _ = data(900)
    labels = model(x).argmax(1)
    with torch.enable_grad():
        F.cross_entropy(model(x), labels).backward()


def hard_samples(model):
    x, y = data(900)
    F.cross_entropy(model(x), y, reduction="none").topk(3)


def line_search(model):
    x, y = data(900)
    with torch.enable_grad():
        F.cross_entropy(model(x), y)
    F.cross_entropy(model(x), y)


@pytest.mark.parametrize(
    "evaluate",
    [
        in_eval,
        monte_carlo,
        monte_carlo_by_modules,
        training_metric,
        pseudo_labels,
        hard_samples,
        line_search,
        lambda model: model(data(900)[0]),  # no loss: a rollout, or the statistics of BatchNorm
    ],
)
def test_forwards_without_gradients_for_another_purpose_are_not_found(evaluate):
    def without_gradients(model):
        with torch.no_grad():
            evaluate(model)

    assert not train(classifier(), evaluate=without_gradients)


def test_a_model_without_dropout_may_be_evaluated_in_train_mode():
    def evaluate(model):
        with torch.no_grad():
            losses(model)

    assert not train(classifier(nn.LayerNorm(16)), evaluate=evaluate)


# -- averaged-weights-not-restored -----------------------------------------------------------------


class Swap:
    """Evaluates a model with averaged weights, and puts the trained ones back, or not."""

    def __init__(self, model, *, restores, by_data=True):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.restores, self.by_data = restores, by_data

    def step(self, model):
        self.average.update_parameters(model)

    def evaluate(self, model):
        kept = copy.deepcopy(model.state_dict())
        if self.by_data:
            for own, averaged in zip(
                model.parameters(), self.average.module.parameters(), strict=True
            ):
                own.data.copy_(averaged.data)
        else:
            model.load_state_dict(self.average.module.state_dict())
        model.eval()
        with torch.no_grad():
            losses(model)
        model.train()
        if self.restores:
            model.load_state_dict(kept)


@pytest.mark.parametrize("by_data", [True, False])
def test_averaged_weights_that_stay_are_found_in_the_next_step(by_data):
    model = classifier()
    swap = Swap(model, restores=False, by_data=by_data)
    (finding,) = train(model, evaluate=swap.evaluate, wrap=swap.step, every=3)
    assert finding.check == "averaged-weights-not-restored"
    assert finding.step == 4
    assert finding.subject == "3.weight"


@pytest.mark.parametrize("case", ["restored", "clipped", "rewound", "new stage"])
def test_weights_that_are_changed_on_purpose_are_not_found(case, tmp_path):
    model = classifier()
    swap = Swap(model, restores=case == "restored")
    first = copy.deepcopy(model.state_dict())
    torch.save(first, tmp_path / "first.pt")

    def clip(model):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    def evaluate(model):
        if case == "restored":
            swap.evaluate(model)
            return
        if case == "rewound":
            model.load_state_dict(torch.load(tmp_path / "first.pt"))
        if case == "new stage":
            model.load_state_dict(first)
            torch.optim.SGD(model.parameters(), lr=0.1)
        model.eval()
        with torch.no_grad():
            losses(model)
        model.train()

    wrap = {"clipped": clip, "restored": swap.step}.get(case)
    assert not train(model, evaluate=evaluate, wrap=wrap, every=3, steps=9)


# -- dropout-ignores-eval-mode ---------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.layer, self.out, self.asks = nn.Linear(8, 8), nn.Linear(8, 3), asks

    def forward(self, x):
        q = self.layer(x)[:, None, None]
        p = 0.3 if self.training or not self.asks else 0.0
        return self.out(F.scaled_dot_product_attention(q, q, q, dropout_p=p)[:, 0, 0])


class Dropping(Attention):
    def forward(self, x):
        return self.out(F.dropout(self.layer(x), 0.3, self.training if self.asks else True))


@pytest.mark.parametrize("kind", [Attention, Dropping])
def test_dropout_that_does_not_know_the_mode_is_found(kind):
    torch.manual_seed(0)
    (finding,) = train(kind(asks=False))
    assert (finding.check, finding.step) == ("dropout-ignores-eval-mode", 2)
    assert train(kind(asks=True)) == []


def test_data_that_are_never_trained_on_are_an_evaluation():
    loader = torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=6)

    def count_hits(model):
        with torch.no_grad():
            for x in loader:
                model(x).argmax(1)

    (finding,) = train(classifier(), evaluate=count_hits)
    assert finding.check == "dropout-in-evaluation"
    assert (
        train(classifier(), evaluate=lambda model: count_hits(model.eval()) or model.train()) == []
    )


class OwnDropout(nn.Module):
    def __init__(self, is_kept):
        super().__init__()
        self.dropout_p, self.is_kept = 0.2, is_kept

    def forward(self, x):
        if not self.training and not self.is_kept:
            self.dropout_p = 0.0
        return F.dropout(x, self.dropout_p, self.training)


@pytest.mark.parametrize("is_kept", [True, False])
def test_dropout_that_an_evaluation_switches_off_is_found(is_kept):
    def evaluate(model):
        model.eval()
        with torch.no_grad():
            model(data(100)[0])
        model.train()

    found = train(classifier(OwnDropout(is_kept)), evaluate=evaluate)
    assert ("dropout-switched-off" in {finding.check for finding in found}) != is_kept
