"""Losses and backwards are seen however the loop reaches the parameters."""

import threading

import pytest
import torch
from loops import batches, make, recorder, same, train, weights
from torch import nn
from torch.nn import functional as F

import hookline

WAYS = {
    "parts": lambda model, x: model.second(torch.relu(model.first(x))),
    "forward": lambda model, x: model.forward(x),
    "functions": lambda model, x: F.linear(F.linear(x, model.first.weight), model.second.weight),
    "functional_call": lambda model, x: torch.func.functional_call(
        model, dict(model.named_parameters()), (x,)
    ),
}


def loop(model, optimizer, predict, per_step=1, steps=2):
    losses = []
    for _ in range(steps):
        for x, y in batches(per_step):
            loss = F.mse_loss(predict(model, x), y)
            (loss / per_step).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("per_step", [1, 3], ids=["alone", "accumulated"])
@pytest.mark.parametrize("predict", WAYS.values(), ids=WAYS)
def test_the_loss_is_seen_where_the_model_is_not_called_directly(predict, per_step, tmp_path):
    hook = recorder("on_after_backward", on_step_end=("loss", "grad_norm"))
    model, optimizer = make()
    plain, plain_optimizer = make()
    torch.manual_seed(0)
    loop(plain, plain_optimizer, predict, per_step)
    torch.manual_seed(0)
    with hookline.attach(model, optimizer, hooks=[hook], runs=tmp_path):
        losses = loop(model, optimizer, predict, per_step)
    assert same(weights(model), weights(plain))
    events = [told if isinstance(told, str) else told[0] for told in hook.told]
    assert events == (["on_after_backward"] * per_step + ["on_step_end"]) * 2
    steps = [told[1] for told in hook.told if told[0] == "on_step_end"]
    expected = [sum(losses[i : i + per_step]) / per_step for i in (0, per_step)]
    assert [step["loss"] for step in steps] == pytest.approx(expected)
    assert all(step["grad_norm"] > 0 for step in steps)
    (folder,) = tmp_path.iterdir()
    recorded = [row["value"] for row in hookline.open_run(folder).metrics("train/loss")]
    assert recorded == pytest.approx(expected)


def test_a_loss_of_a_part_is_seen_beside_that_of_the_model():
    hook = recorder("on_after_backward", on_step_end=("loss",))
    model, optimizer = make()
    x, y = batches(1)[0]
    with hookline.attach(model, optimizer, hooks=[hook]):
        loss = F.mse_loss(model(x), y)
        penalty = model.first(x).square().mean()
        penalty.backward()
        loss.backward()
        optimizer.step()
    assert hook.told[:2] == ["on_after_backward"] * 2
    assert hook.told[2][1]["loss"] == pytest.approx((loss.item() + penalty.item()) / 2)


def test_a_gradient_that_is_computed_within_the_loss_is_not_a_backward():
    """A gradient penalty calls torch.autograd.grad on the model's outputs."""
    hook = recorder("on_after_backward", on_step_end=("loss",))
    model, optimizer = make()
    losses = []
    with hookline.attach(model, optimizer, hooks=[hook]):
        for x, y in batches(2):
            x.requires_grad_()
            outputs = model(x)
            (gradient,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
            loss = F.mse_loss(outputs, y) + gradient.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert hook.told[::2] == ["on_after_backward"] * 2
    assert [told[1]["loss"] for told in hook.told[1::2]] == losses


def test_backwards_of_another_model_are_not_seen():
    hook = recorder("on_after_backward", on_step_end=("loss",))
    model, optimizer = make()
    other = nn.Linear(8, 1)
    x, y = batches(1)[0]
    with hookline.attach(model, optimizer, hooks=[hook]):
        other(x).sum().backward()
        loss = F.mse_loss(model.forward(x), y)
        loss.backward()
        optimizer.step()
    assert hook.told == ["on_after_backward", ("on_step_end", {"loss": loss.item()})]


def test_a_parameter_that_gets_no_gradient_does_not_end_accumulation():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(1, 1)
            self.used = nn.Linear(8, 4)

        def forward(self, x):
            return self.used(x)

    hook = recorder(on_step_end=("loss",))
    model = Unused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookline.attach(model, optimizer, hooks=[hook]):
        losses = loop(model, optimizer, lambda model, x: model(x), per_step=2, steps=1)
    assert hook.told[0][1]["loss"] == pytest.approx(sum(losses) / 2)


def test_the_loss_is_seen_where_the_optimizer_steps_within_backward():
    hook = recorder("on_after_backward", on_step_end=("loss", "step"))
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model.weight.register_post_accumulate_grad_hook(step)
    losses = []
    with hookline.attach(model, optimizer, hooks=[hook]):
        for x, _ in batches(3):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
    steps = [told[1] for told in hook.told if told[0] == "on_step_end"]
    assert [(step["step"], step["loss"]) for step in steps] == list(enumerate(losses, 1))
    assert hook.told.count("on_after_backward") == 3


def test_backwards_of_another_model_in_another_thread_are_not_those_of_this_one():
    model, optimizer = make()
    other, its_optimizer = make(seed=3)
    hook = recorder("on_after_backward", on_step_end=("loss",))
    with hookline.attach(model, optimizer, hooks=[hook]):
        losses = train(model, optimizer, batches(1))

        def train_while(loss):
            """Train the other model while backward of this one has not ended."""
            thread = threading.Thread(target=train, args=(other, its_optimizer, batches(2)))
            thread.start()
            thread.join()

        x, y = batches(1)[0]
        optimizer.zero_grad()
        prediction = model(x)
        prediction.register_hook(train_while)
        loss = F.mse_loss(prediction, y)
        loss.backward()
        optimizer.step()
    ends = [told[1]["loss"] for told in hook.told if told != "on_after_backward"]
    assert ends == [*losses, loss.item()]
    assert hook.told.count("on_after_backward") == 2
