"""Lint changes nothing: random models and loops end in the same state, bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_loop_ranks import PLAIN
from random_loops import LAYERS, OPTIMIZERS, OTHERS, SCHEDULERS, Training
from rank_checks import run_ranks

import hookline
from hookline.errors import HooklineError

CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 999),
        "data": st.sampled_from(["features", "tokens"]),
        "layers": st.lists(st.sampled_from(sorted(LAYERS)), max_size=4),
        "dtype": st.sampled_from(["float32"] * 4 + ["float64", "bfloat16"]),
        "checkpointing": st.sampled_from(["", "", "reentrant", "new"]),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "scheduler": st.sampled_from(sorted(SCHEDULERS)),
        "micro-batches": st.integers(1, 3),
        "zeroed": st.sampled_from(["none", "none", "zeros", ""]),
        "clipped": st.sampled_from(["", "norm", "value"]),
        "autocast": st.sampled_from(["", "", "bfloat16", "float16"]),
        "in between": st.sampled_from(
            ["", "validation", "forgotten train", "copy", "load", "grad", "new optimizer", "freeze"]
        ),
        "others": st.lists(st.sampled_from(sorted(OTHERS)), max_size=3, unique=True),
        **dict.fromkeys(
            [
                *("tied", "sparse", "loss in model", "loader", "scaled", "user hooks", "averaged"),
                *("two optimizers", "retain"),
            ],
            st.booleans(),
        ),
    }
)
"""The cases to train; see `random_loops`."""


def possible(case: dict[str, Any], compiled: str = "") -> dict[str, Any]:
    """Return the case without what torch does not do together."""
    case = {**case, "compiled": compiled, "lbfgs": case["optimizer"] == "lbfgs"}
    if case["lbfgs"]:  # its gradients are computed within the step
        case |= {"two optimizers": False, "scaled": False, "sparse": False}
        case["others"] = [name for name in case["others"] if name in ("capture", "edit")]
    case["sparse"] &= not case["tied"] and case["optimizer"] == "plain sgd"
    if compiled:
        case["user hooks"] = False  # what they append to would compile it again
    if case["sparse"]:
        case |= {"clipped": "", "others": [], "user hooks": False}
    return case


def train(case: dict[str, Any], hooks: list[Any]) -> Any:
    """Return the state after training; or the error, of a loop that torch or Hookline refuse."""
    if case["compiled"]:
        torch.compiler.reset()
    losses: list[float] = []
    try:
        with warnings.catch_warnings():  # torch warns of what such loops do
            warnings.simplefilter("ignore")
            training = Training(case, hooks if hooks or case["others"] else None)
            losses = training.losses
            training.run()
    except (RuntimeError, ValueError, TypeError, AssertionError, HooklineError) as error:
        return type(error), losses, str(error)[:100]
    return training.state()


def check(case: dict[str, Any]) -> None:
    lint = hookline.Lint()
    plain, linted = train(case, []), train(case, [lint])
    if isinstance(plain, tuple):
        assert linted == plain
    else:
        assert not isinstance(linted, tuple), linted
        for one, two in zip(plain, linted, strict=True):
            assert one == two
    failed = {name: why for name, why in lint.left_out.items() if why.startswith("it failed (")}
    assert failed == {}


@settings(max_examples=100, deadline=None)
@given(CASES)
def test_training_is_the_same_with_lint(case: dict[str, Any]) -> None:
    check(possible(case))


@pytest.mark.parametrize("checkpointing", ["", "new"])
def test_a_weight_that_is_computed_is_not_computed_again(checkpointing: str) -> None:
    """Reading the weight of a layer with spectral norm makes a step of its power iteration."""
    check({**PLAIN, "layers": ["spectral norm"], "checkpointing": checkpointing})


@settings(max_examples=8, deadline=None)
@given(CASES, st.sampled_from(["eager", "aot_eager"]))
def test_training_of_a_compiled_model_is_the_same(case: dict[str, Any], backend: str) -> None:
    check(possible(case, backend))


def test_training_on_two_ranks_is_the_same() -> None:
    assert run_ranks("random_loop_ranks.py").count("fine") == 2
