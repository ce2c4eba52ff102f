"""The constant that a loop divides its loss by is read from the loss's graph, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hookline.integrations.bare_loop.step_losses import find_divisor, is_compiled


@pytest.fixture
def loss():
    return (nn.Parameter(torch.ones(3)) * 2).sum()


DIVIDED = {
    "an int": lambda loss: loss / 4,
    "a float": lambda loss: loss / 4.0,
    "a tensor": lambda loss: loss / torch.tensor(4),
    "in place": lambda loss: (loss + 0).div_(4),
    "times the inverse": lambda loss: loss * 0.25,
    "the inverse times": lambda loss: 0.25 * loss,
    "a tensor times": lambda loss: torch.tensor(0.25) * loss,
    "then to float": lambda loss: (loss.bfloat16() / 4).float(),
}


@pytest.mark.parametrize("divide", DIVIDED.values(), ids=DIVIDED)
def test_a_division_by_a_constant_is_found(loss, divide):
    assert find_divisor(divide(loss)) == 4.0


@pytest.mark.parametrize("divide", DIVIDED.values(), ids=DIVIDED)
def test_a_division_beneath_a_scaler_is_found(loss, divide):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert find_divisor(scaler.scale(divide(loss)), is_scaled=True) == 4.0


@given(st.integers(1, 1000))
def test_every_whole_number_is_found(number):
    loss = nn.Parameter(torch.ones(())) * 1.0
    assert find_divisor(loss / number) == number
    assert find_divisor(loss * (1 / number)) == pytest.approx(number, rel=1e-9)


OTHERS = {
    "nothing": lambda loss: loss,
    "a mean": lambda loss: (loss * torch.ones(3)).mean(),
    "a number of the model": lambda loss: loss / nn.Parameter(torch.tensor(4.0)),
    "a product of two losses": lambda loss: loss * loss,
    "a sum after the division": lambda loss: loss / 4 + 1.0,
    "several elements": lambda loss: loss / torch.full((1, 2), 4.0),
    "zero": lambda loss: loss * 0.0,
    "a constant": lambda loss: torch.tensor(4.0),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_everything_else_is_no_division(loss, make):
    assert find_divisor(make(loss)) is None


def test_without_a_scaler_the_scale_is_not_looked_through(loss):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert find_divisor(scaler.scale(loss), is_scaled=True) is None


def test_a_compiled_loss_says_so():
    weight = nn.Parameter(torch.ones(3))
    compiled = torch.compile(lambda: (weight * 2).sum() / 4, backend="aot_eager")
    assert is_compiled(compiled())
    assert find_divisor(compiled()) is None
    assert not is_compiled(weight.sum())
    scaled = torch.amp.GradScaler("cpu").scale(compiled())
    assert is_compiled(scaled, is_scaled=True)
