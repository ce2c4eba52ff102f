"""Resuming from what does not fit or is hostile: one error, and nothing was changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_hookline
from hostile_checkpoints import change_header, change_state, copy_folder, snapshot
from loops import Net
from resumed_training import Fail, loader, make_trainer, newest, objects_of, save_run, text_of
from small_project import PROJECT, TRAINING
from torch import nn

import hookline
from hookline import Trainer
from hookline.checkpoint import CheckpointError

numpy = pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return copy_folder(saved, tmp_path / "runs" / saved.name)


def refused(run: Path, trainer: Trainer, **arguments: Any) -> str:
    """Resume, and return the message; compare the runs and the trainer with what was before."""
    before, objects = snapshot(run.parent), objects_of(trainer)
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(loader(), **arguments)
    assert snapshot(run.parent) == before
    assert objects_of(trainer) == objects
    return str(caught.value)


# -- another training -----------------------------------------------------------------------------


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 4)


OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "SGD": ({"optimizer": torch.optim.SGD}, ["AdamW in the checkpoint and SGD here"]),
    "Adam": ({"optimizer": torch.optim.Adam}, ["AdamW in the checkpoint and Adam here"]),
    "groups": ({"groups": 2}, ["1 parameter group in the checkpoint and 2 here"]),
    "model": ({"model": Wide}, ["first.weight", "second.weight"]),
    "no scheduler": ({"scheduler": None}, ["1 scheduler, and here are 0"]),
    "scheduler": (
        {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR},
        ["StepLR in the checkpoint and CosineAnnealingLR here"],
    ),
    "everything": (
        {"model": Wide, "optimizer": torch.optim.SGD, "groups": 2, "scheduler": None},
        ["first.weight", "SGD here", "2 here", "1 scheduler"],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("how", ["run", "checkpoint"])
def test_another_training_is_one_error_with_all_differences(run: Path, name: str, how: str) -> None:
    options, expected = OTHERS[name]
    made = {**options, "model": options["model"]()} if "model" in options else options
    trainer = make_trainer(run.parent, **made)
    message = refused(run, trainer, resume_from=run if how == "run" else newest(run))
    assert [text for text in expected if text not in message] == []


def test_another_optimizer_is_found_in_checkpoints_without_classes(run: Path) -> None:
    change_state(newest(run), lambda tree: tree["state"].pop("classes") and None)
    message = refused(run, make_trainer(run.parent, optimizer=torch.optim.SGD), resume_from=run)
    assert "optimizer 0: group 0 differs: it has no 'momentum' in the checkpoint" in message


# -- a hostile state ------------------------------------------------------------------------------


def at(*place: Any, value: Any) -> Callable[[Path], None]:
    """Set a value of the state; lists that were written as pairs are looked up by key."""

    def change(tree: Any) -> None:
        inner = tree["state"]
        for key in place[:-1]:
            inner = look_up(inner, key)
        if isinstance(inner, dict) and "$" in inner:
            next(pair for pair in inner["v"] if pair[0] == place[-1])[1] = value
        else:
            inner[place[-1]] = value

    return lambda path: change_state(path, change)


def look_up(inner: Any, key: Any) -> Any:
    if isinstance(inner, dict) and "$" in inner:
        return next(value for name, value in inner["v"] if name == key)
    return inner[key]


def without(*place: Any) -> Callable[[Path], None]:
    def change(tree: Any) -> None:
        inner = tree["state"]
        for key in place[:-1]:
            inner = look_up(inner, key)
        del inner[place[-1]]

    return lambda path: change_state(path, change)


TENSOR = {"$": "tensor", "v": "t0"}
NAN = {"$": "float", "v": "nan"}
SECTIONS = (
    *("optimizers", "schedulers", "scaler", "hooks", "attributes", "disabled", "position"),
    *("means", "step", "epoch", "round", "pending_gradients", "tokens_seen", "best_accuracy"),
    *("sanity_due", "validation_due", "epoch_over"),
)
GROUP = ("optimizers", 0, "param_groups", 0)
PASS = ("position", "loaders", 0, "pass")
HOSTILE: dict[str, Callable[[Path], None]] = {
    **{f"no {name}": without(name) for name in SECTIONS},
    **{f"{name} is a text": at(name, value="x") for name in SECTIONS},
    "a negative step": at("step", value=-1),
    "a step that is a boolean": at("step", value=True),
    "a step above 64 bits": at("step", value={"$": "int", "v": hex(1 << 70)}),
    "a step that is NaN": at("step", value=NAN),
    "an epoch that is a list": at("epoch", value=[1]),
    "a negative position in the log": at("run", "metrics", value=-5),
    "a position in the log that is a text": at("run", "metrics", value="0"),
    "a log position without a size": at("run", value={"step": 0}),
    "a mean that is a text": at("means", value={"loss": {"mean": "x", "weight": 1.0}}),
    "a learning rate that is a text": at(*GROUP, "lr", value="0.1"),
    "a learning rate that is a list": at(*GROUP, "lr", value=[0.1]),
    "no learning rate": without(*GROUP, "lr"),
    "a learning rate that is None": at(*GROUP, "lr", value=None),
    "a group without parameters": without(*GROUP, "params"),
    "a state of a parameter that is a text": at("optimizers", 0, "state", 0, value="x"),
    "a state of other shapes": at("optimizers", 0, "state", 0, "exp_avg", value=TENSOR),
    "a scheduler whose count is a text": at("schedulers", 0, "last_epoch", value="x"),
    "random states of a wrong size": at("position", "now", "torch", value=TENSOR),
    "no random states": at("position", "now", value={}),
    "a numpy state that ends too far": at("position", "now", "numpy", 2, value=10**6),
    "a numpy state of another kind": at("position", "now", "numpy", 0, value="PCG64"),
    "a python state of another version": at("position", "now", "python", 0, value=99),
    "a generator of a wrong size": at("position", "generators", 0, value=TENSOR),
    "a generator that is a text": at("position", "generators", 0, value="x"),
    "more batches than there are": at("position", "batches", value=1 << 62),
    "negative batches": at("position", "batches", value=-1),
    "passes without end": at("position", "loaders", 0, "ended", value=[[1, 1 << 62]]),
    "passes of length zero": at("position", "loaders", 0, "ended", value=[[0, 1 << 62]]),
    "a pass that is a text": at(*PASS, value="x"),
    "a pass without indices": without(*PASS, "indices"),
    "a pass with generators missing": at(*PASS, "start", "generators", value=[]),
    "a pass with other random states": at(*PASS, "indices", "first", "random", value={}),
    "a negative number of indices": at(*PASS, "indices", "drawn", value=-1),
    "gradients of other optimizers": at("pending_gradients", value=[None, None]),
    "gradients of other shapes": at("pending_gradients", value=[[TENSOR]]),
    "a hook's state that is a text": at("hooks", "model_checkpoint", value="x"),
    "a hook's state that is empty": at("hooks", "model_checkpoint", value={}),
    "a hook's list of a stranger's folders": at(
        *("hooks", "model_checkpoint", "checkpoints", "latest"),
        value=[{"name": "../../../victim", "step": 4, "number": 0, "score": None}],
    ),
    "a hook's count that is a text": at("hooks", "model_checkpoint", "saved_at", value="x"),
    "a version of a module that is a text": lambda path: change_state(
        path, lambda tree: tree["metadata"].update(first={"version": "x"})
    ),
    "a weight that is no tensor": lambda path: change_state(
        path, lambda tree: tree["model"].update({"first.weight": 3})
    ),
    "weights that are missing": lambda path: change_header(
        path, lambda header: header.update({"x": header.pop("first.bias")})
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_state_changes_nothing(run: Path, name: str) -> None:
    (run.parent / "victim").mkdir()
    HOSTILE[name](newest(run))
    message = refused(run, make_trainer(run.parent), resume_from=newest(run))
    assert str(newest(run)) in message
    assert len(message) < 5000


NOT_LOADED = ("no position", "a state of other shapes", "random states of a wrong size")


@pytest.mark.parametrize("name", NOT_LOADED)
@pytest.mark.parametrize("how", ["auto", "fork"])
def test_other_ways_to_start_change_nothing_either(run: Path, name: str, how: str) -> None:
    HOSTILE[name](newest(run))
    if how == "auto":
        refused(run, make_trainer(run.parent, Fail()), resume_from="auto")
    else:
        refused(run, make_trainer(run.parent), fork_from=newest(run))


def test_a_checkpoint_that_fits_is_resumed(run: Path) -> None:
    trainer = make_trainer(run.parent)
    trainer.fit(loader(), resume_from=newest(run))
    assert (trainer.status, trainer.step) == ("completed", 12)


# -- bare loops -----------------------------------------------------------------------------------


def make_session(path: Path, optimizer: Any = torch.optim.AdamW) -> Any:
    torch.manual_seed(0)
    model = Net()
    own = optimizer(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 2)
    return hookline.attach(model, own, schedulers=[scheduler], runs=path), model, own, scheduler


@pytest.fixture(scope="module")
def saved_by_loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loop") / "runs"
    session, model, optimizer, scheduler = make_session(path)
    with session:
        for x, y in loader():
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        session.save_checkpoint()
    (run,) = path.iterdir()
    return run


LOOP_SECTIONS = ("optimizers", "schedulers", "scaler", "hooks", "disabled", "means", "step")
LOOP_HOSTILE = {
    **{f"no {name}": without(name) for name in LOOP_SECTIONS},
    **{f"{name} is a text": at(name, value="x") for name in LOOP_SECTIONS},
    "a state of other shapes": HOSTILE["a state of other shapes"],
    "a learning rate that is a text": HOSTILE["a learning rate that is a text"],
    "random states of a wrong size": at("random", "torch", value=TENSOR),
    "a numpy state that ends too far": at("random", "numpy", 2, value=10**6),
    "a negative position in the log": at("run", "metrics", value=-5),
    "extra that is a list": at("extra", value=[]),
}


@pytest.mark.parametrize("name", [*LOOP_HOSTILE, "SGD", "Adam"])
def test_a_bare_loop_is_not_changed_either(saved_by_loop: Path, tmp_path: Path, name: str) -> None:
    run = copy_folder(saved_by_loop, tmp_path / "runs" / saved_by_loop.name)
    if name in LOOP_HOSTILE:
        LOOP_HOSTILE[name](newest(run))
    other = torch.optim.AdamW if name in LOOP_HOSTILE else getattr(torch.optim, name)
    session, model, optimizer, _ = make_session(run.parent, other)
    before = snapshot(run.parent)
    objects = text_of(model, optimizer)
    with pytest.raises(CheckpointError):
        session.load_checkpoint(run)
    assert snapshot(run.parent) == before
    assert text_of(model, optimizer) == objects


# -- the command ----------------------------------------------------------------------------------


def test_the_command_train_reports_what_does_not_fit_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(PROJECT)
    (tmp_path / "late.py").write_text("")
    (tmp_path / "train.yaml").write_text(TRAINING)
    done = run_hookline("train", "train.yaml", "trainer.max_epochs=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    without("means")(newest(run))
    before = snapshot(tmp_path / "runs")
    for option in ("--resume", "--from"):
        again = run_hookline("train", "train.yaml", f"{option}={run.name}", cwd=tmp_path)
        assert again.returncode == 1
        assert "Traceback" not in again.stderr
        assert "means: Field required" in again.stderr
        assert snapshot(tmp_path / "runs") == before
