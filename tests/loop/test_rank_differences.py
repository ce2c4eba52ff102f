"""Two processes that are not alike: what they return, which hooks they have, what one asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_training import loaders
from rank_checks import run_ranks
from test_ranks import read_lines, results
from torch import nn

import hookline
from hookline.checkpoint import load_checkpoint

SCRIPT = Path(__file__).parents[1] / "support" / "rank_differences.py"
NAMES = ("metrics", "non_finite", "buffers", "differences", "on_main", "not_called", "unused")
NAMES += ("late_order", "few_batches", "late_update", "used_buffers", "unsupported")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; expected a whole number of 1 or more"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
    ],
)
def test_variables_that_torchrun_would_not_set(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    usual = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in (usual | variables).items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(2, 2)
    with pytest.raises(hookline.TrainingError, match=said):
        hookline.get_trainer("ddp", model, [], torch.optim.SGD(model.parameters()))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("two")
    run_ranks(SCRIPT, folder, *NAMES)
    return results(folder, *NAMES), folder


def test_a_metric_of_one_rank_does_not_mix_with_others(two) -> None:
    ranks, folder = two
    recorded = read_lines(folder / "metrics", "metrics.jsonl")
    losses = [line["value"] for line in recorded if line["name"] == "train/loss"]
    of_ranks = zip(*(rank["metrics"]["losses"] for rank in ranks), strict=True)
    assert losses == pytest.approx([sum(both) / 2 for both in of_ranks])
    accuracies = [line for line in recorded if line["name"] == "train/accuracy"]
    assert [line["step"] for line in accuracies] == list(range(1, len(losses) + 1))
    assert {line["value"] for line in accuracies} == {100.0}


def test_a_loss_of_one_rank_that_is_not_finite_leaves_no_gradients_in_another(two) -> None:
    ranks, _ = two
    assert [rank["non_finite"]["equal"] for rank in ranks] == [True, True]
    assert {rank["non_finite"]["steps"] for rank in ranks} == {8}  # of 9, one is skipped
    assert any("[rank 1] The loss is nan" in line for line in ranks[1]["non_finite"]["lines"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_validate_the_model_that_is_saved(two, strategy: str) -> None:
    ranks, _ = two
    first, second = (rank["buffers"][strategy] for rank in ranks)
    assert first["means"] == second["means"]
    assert first["validated"] == second["validated"]
    saved = load_checkpoint(Path(first["path"])).model
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).eval()
    model.load_state_dict(saved)
    x, y = loaders()[1].dataset[:]
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), y).item()
    assert first["validated"][1] == pytest.approx(loss, rel=1e-5)  # sums in another order


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_are_those_of_rank_0_in_every_step_and_are_resumed_exactly(two, strategy) -> None:
    first, second = (rank["used_buffers"][strategy] for rank in two[0])
    assert first == second
    assert first["resumed"] == first["whole"]
    assert first["hooks"] == 0 if strategy == "ddp" else first["hooks"] == 1  # FSDP2's own


def test_both_strategies_train_the_same_with_buffers(two) -> None:
    ends = two[0][0]["used_buffers"]
    for name, value in ends["ddp"]["whole"].items():
        other = torch.tensor(ends["fsdp"]["whole"][name])
        torch.testing.assert_close(torch.tensor(value), other)  # sums in another order


def test_a_scalar_parameter_with_fsdp2_is_named_before_anything_starts(two) -> None:
    for rank in two[0]:
        assert "they are scalars: 'scale'." in rank["unsupported"]["scalar"]


def test_a_step_fn_may_read_attributes_of_the_wrapper(two) -> None:
    assert [rank["unsupported"]["status"] for rank in two[0]] == ["completed", "completed"]


@pytest.mark.parametrize(
    ("part", "said"),
    {
        "hooks": "extra: ",
        "settings": "accumulate: 1 in rank 0, 2 in rank 1",
        "optimizers": "optimizer 0.groups.0.lr: 0.01 in rank 0, 0.5 in rank 1",
        "loaders": "validation loaders: ['val'] in rank 0, [] in rank 1",
    }.items(),
)
def test_ranks_that_would_train_differently_are_an_error_in_all(two, part: str, said: str) -> None:
    for rank in two[0]:
        assert rank["differences"][part].startswith(f"The {part} of the processes differ ({said}")


def test_what_a_hook_of_rank_0_does_never_makes_it_wait(two) -> None:
    first, second = (rank["on_main"] for rank in two[0])
    assert first["copies"] == [True, True]
    (error,) = first["errors"]
    assert "trainer.validate() was called in the hook 'on_main'" in error
    assert first["lr"] == second["lr"] < 0.01
    assert first["equal"]
    assert second["equal"]


@pytest.mark.parametrize("strategy", ["ddp", "accelerate"])
def test_a_loss_without_a_call_of_the_model_is_an_error(two, strategy: str) -> None:
    for rank in two[0]:
        assert "without calling `model`" in rank["not_called"][strategy]


def test_parameters_may_be_unused_if_that_is_allowed(two) -> None:
    for rank in two[0]:
        assert rank["unused"] == {"status": "completed", "equal": True}


@pytest.mark.parametrize("source", ["sampler", "iterable"])
def test_an_order_that_is_drawn_late_is_the_same_in_all_ranks(two, source: str) -> None:
    first, second = (rank["late_order"][source] for rank in two[0])
    assert sorted(first + second) == list(range(40))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_may_have_no_batch_of_a_validation_loader(two, strategy: str) -> None:
    first, second = (rank["few_batches"][strategy] for rank in two[0])
    assert first["batches"] == ["a0", "a1", "b0", "c0", "c1", "c2"]
    assert second["batches"] == ["a0", "c0", "c1"]
    assert first["uneven"] == second["uneven"]


def test_an_update_that_is_added_in_one_rank_is_an_error_in_all(two) -> None:
    for rank in two[0]:
        assert rank["late_update"]["steps"] == 3
        assert "rank 1 ['noise', 'identity']" in rank["late_update"]["error"]
