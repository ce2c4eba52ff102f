"""The same hooks in every loop: the same events, gradients, metrics and weights as in the trainer.

What differs is named here, with the reason. Sums of gradients are formed in another order where a
loop divides the loss elsewhere, and where two processes average theirs, so numbers agree within
1e-5.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import WRITTEN, HalveHead, Norms, built_ins, run
from every_loop import LOOPS, LOOPS_OF_RANKS, MISSING, missing_events
from rank_checks import run_ranks

import hookline
from hookline.config.hook_names import BUILT_INS, load_class
from hookline.errors import NotSuppliedError

logging.getLogger("transformers").setLevel(logging.ERROR)

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what hooks see in Hookline's own trainer."""
    return run(LOOPS["trainer"], tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what they see there beside an update."""
    return run(LOOPS["trainer"], tmp_path_factory.mktemp("update"), HalveHead())


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return what they see in each of two processes, beside an update, by loop."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("conformance_ranks.py", folder, imports=["transformers.trainer"])
    first, second = (torch.load(folder / f"{rank}.pt") for rank in (0, 1))
    return {name: [first[name], second[name]] for name in first}


def comparable(events: list[str], loop: str) -> list[str]:
    """Return the events in order; a checkpoint is written in the background, so it comes last."""
    missing = missing_events(loop)
    found = [event for event in events if event.split()[0] not in missing]
    return sorted(found, key=lambda event: event == "on_checkpoint_save")


def assert_same_calls(found: dict[str, Any], expected: dict[str, Any], loop: str) -> None:
    """Compare what hooks of one process were called with, apart from numbers."""
    assert comparable(found["events"], loop) == comparable(expected["events"], loop)
    for key in ("dialects", "toggled", "captured", "status"):
        assert found[key] == expected[key], key
    assert found["failed"] == expected["failed"] == {"failing": 3}


def assert_same_values(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """Compare the numbers that hooks got."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=TOLERANCE), name


def assert_same_files(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare what was recorded, written and sent."""
    for name, records in expected["records"].items():
        steps, values = zip(*records, strict=True)
        found_steps, found_values = zip(*found["records"][name], strict=True)
        assert found_steps == steps, name
        assert found_values == pytest.approx(values, rel=TOLERANCE), name
    for key in ("recorded status", "saved", "written", "notifications"):
        assert found[key] == expected[key], key
    assert found["written"] == sorted(WRITTEN)
    assert found["notifications"] == 1


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weights in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weights, rtol=TOLERANCE, atol=1e-6)


def test_all_built_in_hooks_are_among_them(tmp_path: Path) -> None:
    kinds = {type(hook) for hook in built_ins(tmp_path, "http://localhost/")}
    known = {load_class(path) for path in BUILT_INS.values()}
    assert {kind for kind in known if not issubclass(kind, hookline.UpdateHook)} == kinds


@pytest.mark.parametrize("loop", [name for name in LOOPS if name != "trainer"])
def test_hooks_see_the_same_in_every_loop(loop, expected, tmp_path) -> None:
    found = run(LOOPS[loop], tmp_path, name=loop, missing=missing_events(loop))
    assert_same_calls(found, expected, loop)
    assert_same_values(found["values"], expected["values"])
    assert_same_files(found, expected)
    assert_same_weights(found, expected)
    assert [step for step, _ in found["noise"]] == [2, 4, 6]
    noise = [value for _, value in expected["noise"]]
    assert [value for _, value in found["noise"]] == pytest.approx(noise, rel=1e-4)


@pytest.mark.parametrize("loop", LOOPS_OF_RANKS)
def test_hooks_see_the_same_in_two_processes(loop, updated, of_ranks) -> None:
    """Losses are those of each process, half of a batch; everything else is that of both."""
    both = of_ranks[loop]
    for found in both:
        assert_same_calls(found, updated, loop)
        assert_same_weights(found, updated)
    means = {}
    for name in ("batch loss", "loss"):
        first, second = (found["values"][name] for found in both)
        assert first != pytest.approx(second, rel=TOLERANCE)
        means[name] = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    for found in both:
        assert_same_values({**found["values"], **means}, updated["values"])
    assert_same_files(both[0], updated)
    assert both[1]["notifications"] == 0


@pytest.mark.parametrize("loop", LOOPS_OF_RANKS)
def test_all_processes_stop_when_one_asks(loop, of_ranks) -> None:
    assert [found["stopped"] for found in of_ranks[loop]] == [(2, "stopped")] * 2


@pytest.mark.parametrize("loop", LOOPS_OF_RANKS)
def test_averages_in_validation_leave_training_alone(loop, expected, of_ranks) -> None:
    for found in of_ranks[loop]:
        norms = expected["values"]["step norm"]
        assert found["norms beside averages"] == pytest.approx(norms, rel=TOLERANCE)


def test_a_signal_to_one_process_saves_and_ends_all(of_ranks) -> None:
    """In Hugging Face's trainer: the others learn of it at the end of the next step."""
    assert of_ranks["signal"] == [(3, "preempted", "checkpoint-3")] * 2


def test_the_loss_of_a_language_model_in_two_processes(of_ranks) -> None:
    """Hugging Face divides by the tokens of both, so each process has a part of the loss."""
    first, second = of_ranks["language model"]
    assert first["norms"] == pytest.approx(second["norms"], rel=TOLERANCE)
    assert first["losses"] != second["losses"]
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert [value for _, value in first["records"]] == pytest.approx(means, rel=TOLERANCE)
    assert first["log"] == pytest.approx(means, rel=1e-3)
    assert first["last"] == second["last"] == "checkpoint-4"  # complete, with the files of both


@pytest.mark.parametrize("loop", ["sharded checkpoints", "sharded Lightning"])
def test_a_sharded_training_is_resumed_with_its_averages(loop, of_ranks) -> None:
    """Hugging Face's and Lightning's trainers under FSDP2: averages are sharded, too."""
    for found in of_ranks[loop]:
        whole, resumed = found["whole"], found["resumed"]
        assert whole["are sharded"]
        assert resumed["ended"] == whole["ended"] == (6, "completed", 6)
        for part in ("averages", "weights"):
            for name, value in whole[part].items():
                torch.testing.assert_close(resumed[part][name], value, rtol=0, atol=0)


def test_sharded_averages_are_saved_whole(of_ranks) -> None:
    for found in of_ranks["sharded checkpoints"]:
        whole, saved = found["whole"], found["saved"]
        assert whole["last"] == "checkpoint-6"
        assert saved["steps"] == 2
        for name, average in whole["averages"].items():
            assert saved["averages"][name].shape == average.shape
            assert not torch.equal(saved["averages"][name], average)


@pytest.mark.parametrize("loop", [name for name in LOOPS if name != "trainer"])
def test_an_update_changes_training_in_the_same_way(loop, expected, updated, tmp_path) -> None:
    found = run(LOOPS[loop], tmp_path, HalveHead(), name=loop, missing=missing_events(loop))
    assert_same_weights(found, updated)
    first = next(iter(expected["weights"].values()))
    assert not torch.allclose(next(iter(updated["weights"].values())), first, rtol=1e-3)


@pytest.mark.parametrize("loop", MISSING)
def test_what_a_loop_does_not_give_is_refused_by_name(loop, tmp_path) -> None:
    for event in MISSING[loop]:
        method = {event: lambda self: None}
        hook = type("Needy", (hookline.Hook,), method)()
        with pytest.raises(NotSuppliedError, match=event):
            LOOPS[loop]([hook], tmp_path)


@pytest.mark.parametrize("loop", [name for name in LOOPS if "trainer" not in name])
def test_sharpness_is_refused_by_name_before_the_first_step(loop, tmp_path) -> None:
    steps = Norms()
    with pytest.raises(hookline.HooklineError, match="Sharpness"):
        LOOPS[loop]([hookline.Sharpness(), steps], tmp_path)
    assert steps.seen == []
