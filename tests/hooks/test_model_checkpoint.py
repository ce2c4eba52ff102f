"""ModelCheckpoint and CheckpointHook in real trainings: what is on disk afterwards."""

from __future__ import annotations

import json
import math
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from loops import batches, make, make_trainer, run_on_two_ranks, same, train, weights

import hookline
from hookline import CheckpointError, ConfigError, HookFailedError, Trainer
from hookline.checkpoint import (
    complete_checkpoints,
    find_checkpoint,
    load_checkpoint,
)
from hookline.checkpoint.retention import remove_checkpoint
from hookline.hooks.checkpointing import model_checkpoint
from hookline.hooks.checkpointing.checkpoint_hook import CheckpointHook
from hookline.hooks.checkpointing.model_checkpoint import ModelCheckpoint


class Scores(hookline.Hook):
    """Puts a number of our choice among the metrics of each validation."""

    def __init__(self, *scores, name="val/score"):
        self.scores = list(scores)
        self.metric = name

    def on_validation_end(self, metrics):
        if self.scores:
            metrics[self.metric] = self.scores.pop(0)


def trainer_of(tmp_path: Path, *hooks, **options) -> Trainer:
    return make_trainer(*hooks, **{"runs": tmp_path / "runs", "max_epochs": 4} | options)


def fit(tmp_path, *hooks, validate=True, resume_from=None, n=3, **fields) -> Trainer:
    trainer = trainer_of(tmp_path, *hooks, **fields)
    return trainer.fit(
        batches(n), val_loaders=batches(1, seed=2) if validate else None, resume_from=resume_from
    )


def names(trainer: Trainer) -> list[str]:
    return [p.name for p in complete_checkpoints(trainer.run.checkpoints)]


def saved(hook: ModelCheckpoint) -> list[dict]:
    """The checkpoints that a hook keeps, as it saves them in its own state."""
    return hook.state_dict()["checkpoints"]["kept"]


def steps(trainer: Trainer) -> list[int]:
    return [load_checkpoint(p).info["step"] for p in complete_checkpoints(trainer.run.checkpoints)]


# -- which are kept -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_top_k", "expected"),
    [(0, []), (1, [6]), (2, [6, 12]), (3, [3, 6, 12]), (-1, [3, 6, 9, 12])],
)
def test_the_best_k_stay(tmp_path, save_top_k, expected):
    options = {} if save_top_k else {"keep_every": 100}  # which keeps none of these
    hook = ModelCheckpoint(save_top_k, "val/score", save_on_train_epoch_end=True, **options)
    trainer = fit(tmp_path, Scores(3.0, 1.0, 4.0, 2.0), hook)
    assert steps(trainer) == expected
    best = trainer.run.checkpoints / "best"
    if save_top_k:
        assert hook.best_model_score == 1.0
        assert find_checkpoint(best) == hook.best_model_path
        assert load_checkpoint(best.parent / best.read_text().strip()).info["step"] == 6
    else:
        assert hook.best_model_path is None
        assert hook.best_model_score is None
        assert not best.exists()


def test_without_a_metric_the_newest_stays(tmp_path):
    hook = ModelCheckpoint()
    trainer = fit(tmp_path, hook)
    assert steps(trainer) == [12]
    assert hook.best_model_path is None
    assert hook.last_model_path == find_checkpoint(trainer.run.path)


def test_the_last_is_the_state_at_the_end_of_training(tmp_path):
    options = {"monitor": "val/score", "save_last": True, "every_n_steps": 100}
    trainer = fit(tmp_path, Scores(1.0, 2.0), ModelCheckpoint(**options), n=4, max_epochs=2)
    assert steps(trainer) == [8]
    saved = load_checkpoint(find_checkpoint(trainer.run.path))
    assert all(torch.equal(saved.model[n], p) for n, p in trainer.model.state_dict().items())

    # What goes on from there is the training that was longer from the start.
    longer = fit(tmp_path, Scores(1.0, 2.0, 3.0), ModelCheckpoint(**options), n=4, max_epochs=3)
    again = fit(
        tmp_path,
        Scores(3.0),
        ModelCheckpoint(**options),
        n=4,
        max_epochs=3,
        resume_from=trainer.run.path,
    )
    assert same(weights(again.model), weights(longer.model))
    assert steps(again)[-1] == 12


@pytest.mark.parametrize("without", [{"save_last": False}, {"save_last": True}])
def test_a_training_that_is_stopped_saves_its_end_and_one_that_fails_does_not(tmp_path, without):
    class Ends(hookline.Hook):
        critical = True

        def __init__(self, how):
            self.how = how

        def on_step_end(self, trainer, step):
            if step == 2 and self.how == "stop":
                trainer.stop("enough")
            elif step == 2:
                raise RuntimeError("broken")

    stopped = fit(tmp_path, Ends("stop"), ModelCheckpoint(monitor="val/score", **without))
    assert steps(stopped) == ([2] if without["save_last"] else [])
    failed = trainer_of(tmp_path, Ends("fail"), ModelCheckpoint(**without))
    with pytest.raises(hookline.HookFailedError):
        failed.fit(batches(3))
    assert steps(failed) == []


def test_the_n_newest_and_the_first_of_every_m_steps_stay_too(tmp_path):
    hook = ModelCheckpoint(1, "val/score", keep_last=2, keep_every=7)
    trainer = fit(tmp_path, Scores(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), hook, max_epochs=7)
    # Epochs have three steps. The best is that of step 3; 9 is the first from 7 on, 15 from 14.
    assert steps(trainer) == [3, 9, 15, 18, 21]
    assert hook.best_model_score == 1.0


def test_nan_never_becomes_the_best(tmp_path, caplog):
    hook = ModelCheckpoint(monitor="val/score")
    scores = Scores(math.nan, 2.0, math.nan, -math.inf)
    assert steps(fit(tmp_path, scores, hook)) == [6]
    assert hook.best_model_score == 2.0
    assert "'val/score' is nan at step 3, so this checkpoint ranks last." in caplog.text


def test_what_users_saved_themselves_is_never_removed(tmp_path):
    class Saves(hookline.Hook):
        def on_validation_end(self, trainer):
            trainer.save_checkpoint()

    trainer = fit(
        tmp_path, Saves(), Scores(4.0, 3.0, 2.0, 1.0), ModelCheckpoint(monitor="val/score")
    )
    assert names(trainer) == [
        "step_000003",
        "step_000006",
        "step_000009",
        "step_000012",
        "epoch=3-step=12",
    ]


# -- when it saves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fields", "expected"),
    [
        ({"monitor": "val/score"}, {}, [6]),
        ({"monitor": "val/score", "mode": "max"}, {}, [9]),
        ({"monitor": "val/tie"}, {}, [3]),  # the earlier of equal ones
        ({"monitor": "val/tie", "save_last": True}, {}, [3, 12]),
        (
            {"save_top_k": -1, "save_on_train_epoch_end": True},
            {"validate_every_steps": 2, "max_epochs": 2},
            [3, 6],
        ),
        ({"save_top_k": -1}, {"validate_every_epochs": 2}, [6, 12]),
        ({"save_top_k": -1, "every_n_epochs": 2}, {"max_epochs": 5}, [6, 12]),
    ],
)
def test_options_say_when_to_save_and_what_to_keep(tmp_path, options, fields, expected):
    hooks = [Scores(3.0, 1.0, 4.0, 2.0), Scores(1.0, 1.0, 1.0, 1.0, name="val/tie")]
    trainer = trainer_of(tmp_path, hooks[0], ModelCheckpoint(**options), **fields)
    trainer.add_hook(hooks[1])
    trainer.fit(batches(3), val_loaders=batches(1, seed=2))
    assert steps(trainer) == expected


def test_every_n_steps_with_the_latest_metric_there_is(tmp_path):
    hook = ModelCheckpoint(save_top_k=-1, monitor="val/score", every_n_steps=2, filename="{step}")
    trainer = fit(tmp_path, Scores(5.0, 4.0, 3.0, 2.0), hook, max_epochs=3)
    assert steps(trainer) == [2, 4, 6, 8]
    scores = {one["step"]: one["score"] for one in saved(hook)}
    assert math.isnan(scores[2]), "nothing was known yet"
    # At step 6 the epoch ends: the validation that follows measures the same weights.
    assert (scores[4], scores[6], scores[8]) == (5.0, 4.0, 4.0)
    assert hook.best_model_score == 4.0


def test_every_n_steps_and_a_metric_that_never_comes_is_an_error_after_an_epoch(tmp_path):
    hook = ModelCheckpoint(monitor="val/nothing", every_n_steps=2)
    with pytest.raises(HookFailedError, match="'val/nothing', which is missing"):
        fit(tmp_path, hook)


def test_a_validation_before_training_is_not_saved(tmp_path):
    hook = ModelCheckpoint(save_top_k=-1, monitor="val/score")
    trainer = trainer_of(
        tmp_path, Scores(0.0, 3.0, 2.0), hook, sanity=True, validate_every_epochs=2, max_epochs=3
    )
    trainer.fit(batches(3), val_loaders=batches(1, seed=2))
    assert steps(trainer) == [6]
    trainer.validate()  # nor one after it
    assert steps(trainer) == [6]
    assert hook.best_model_score == 3.0


def test_every_n_minutes(tmp_path, monkeypatch):
    clock = count(0, 20)  # each step takes 20 seconds
    monkeypatch.setattr(model_checkpoint, "monotonic", lambda: next(clock))
    hook = ModelCheckpoint(save_top_k=-1, every_n_minutes=1)
    assert steps(fit(tmp_path, hook, validate=False, n=4, max_epochs=2)) in ([2, 5, 8], [3, 6])


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "epoch=0-step=3"),
        ({"auto_insert_metric_name": False}, "0-3"),
        (
            {"filename": "epoch_{epoch}_loss_{val/score:.2f}", "auto_insert_metric_name": False},
            "epoch_0_loss_0.12",
        ),
        ({"filename": "{step:04d} {val/score:.1e}"}, "step=0003 val_score=1.2e-01"),
        ({"filename": "a/b/{epoch:/>3}", "auto_insert_metric_name": False}, "a_b___0"),
        ({"filename": "../{epoch}"}, "_.._epoch=0"),
        ({"filename": "last"}, "_last"),
        ({"filename": "{eval/score:.0f}{{x}}", "auto_insert_metric_name": False}, "0{x}"),
    ],
)
def test_names_hold_counters_and_metrics_and_are_one_folder(tmp_path, options, expected):
    hook = ModelCheckpoint(**options)
    trainer = fit(tmp_path, Scores(0.123), hook, max_epochs=1)
    assert names(trainer) == [expected]
    assert find_checkpoint(trainer.run.path).name == expected


@pytest.mark.parametrize("filename", ["{", "{}", "{epoch!r}", "{val/loss:d}", "{epoch:q}", " "])
def test_a_filename_that_cannot_be_used_is_an_error_at_once(filename):
    with pytest.raises(ConfigError, match="filename is"):
        ModelCheckpoint(filename=filename)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 2, "every_n_epochs": 2}, "every and every_n_epochs both"),
        ({"every_n_steps": 2, "every_n_minutes": 1}, "every and every_n_minutes both"),
        ({"every_n_minutes": 1, "every_n_epochs": 2}, "every_n_minutes and every_n_epochs both"),
        ({"save_top_k": 0, "every": 5}, "save_top_k=0 alone keeps no checkpoint"),
        ({"save_top_k": -1, "keep_last": 2}, "so 'keep_last' has no effect"),
        (
            {"save_top_k": -1, "keep_every": 2},
            "so 'keep_every' has no effect",
        ),
    ],
)
def test_options_that_make_no_sense_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ModelCheckpoint(**options)


@pytest.mark.parametrize("options", [{"save_last": True}, {"keep_last": 1}, {"keep_every": 9}])
def test_no_best_checkpoint_is_fine_if_another_option_keeps_some(options):
    ModelCheckpoint(save_top_k=0, **options)


def test_by_steps_it_works_in_a_bare_loop(tmp_path, caplog):
    model, optimizer = make()
    options = {"monitor": "train/loss", "every_n_steps": 2, "keep_last": 1, "filename": "{step}"}
    hook = ModelCheckpoint(2, folder=tmp_path, **options)
    newest = ModelCheckpoint(every_n_steps=3, folder=tmp_path / "newest", save_last=True)
    with hookline.attach(model, optimizer, hooks=[hook, newest], runs=None):
        train(model, optimizer, batches(8))
    assert len(complete_checkpoints(tmp_path)) in (2, 3)
    assert (tmp_path / "step=8").is_dir()
    assert [load_checkpoint(p).info["step"] for p in complete_checkpoints(tmp_path / "newest")] == [
        8
    ]
    assert caplog.text == ""


@pytest.mark.parametrize(("save_top_k", "kept"), [(1, [8]), (3, [6, 7, 8])])
def test_a_metric_that_never_comes_is_warned_of_once_and_the_newest_stay(
    tmp_path, caplog, save_top_k, kept
):
    model, optimizer = make()
    hook = ModelCheckpoint(save_top_k, "train/los", every_n_steps=1, folder=tmp_path)
    with hookline.attach(model, optimizer, hooks=[hook], runs=None):
        train(model, optimizer, batches(8))
    assert [load_checkpoint(p).info["step"] for p in complete_checkpoints(tmp_path)] == kept
    assert caplog.text.count("WARNING") == 1
    assert "'train/los', which is missing. Did you mean 'train/loss'?" in caplog.text
    assert "the second checkpoint without it, at step 2" in caplog.text


def test_a_metric_that_validation_will_measure_is_not_warned_of(tmp_path, caplog):
    hook = ModelCheckpoint(monitor="val/score", every_n_steps=1)
    fit(tmp_path, Scores(5.0, 4.0, 3.0, 2.0), hook)
    assert "missing" not in caplog.text


# -- failures -------------------------------------------------------------------------------------


class Changes(hookline.Hook):
    """Changes the hooks before some steps."""

    def __init__(self, **changes):
        self.changes = {int(step.removeprefix("before_")): c for step, c in changes.items()}

    def on_train_batch_start(self, trainer, step):
        if step + 1 in self.changes:
            self.changes[step + 1](trainer)


def test_a_failed_save_frees_the_name_and_the_end_of_training_saves_again(tmp_path):
    class Fails(hookline.Hook):
        """Reports the save of step 4 as failed instead of saving, as a full disk would."""

        def on_train_start(self, trainer):
            save = trainer.save_checkpoint

            def save_or_fail(path, **options):
                if trainer.step == 4 and trainer.status == "training":
                    hook.checkpoint_failed(str(path), OSError("full"))
                else:
                    save(path, **options)

            trainer.save_checkpoint = save_or_fail

    hook = ModelCheckpoint(every_n_steps=2, save_last=True, filename="{step}")
    trainer = fit(tmp_path, Fails(), hook, validate=False, n=4, max_epochs=1)
    assert names(trainer) == ["step=4"]
    assert hook.last_model_path.name == "step=4"


# -- resuming -------------------------------------------------------------------------------------


def test_a_resumed_run_knows_its_checkpoints_and_scores(tmp_path):
    whole = fit(tmp_path / "whole", Scores(4.0, 3.0, 2.0, 5.0), ModelCheckpoint(2, "val/score"))
    first = fit(tmp_path, Scores(4.0, 3.0, 2.0), ModelCheckpoint(2, "val/score"), max_epochs=3)
    hook = ModelCheckpoint(2, "val/score")
    trainer = fit(tmp_path, Scores(5.0), hook, resume_from=first.run.path)
    assert trainer.run.path == first.run.path
    assert steps(trainer) == steps(whole) == [6, 9]
    assert hook.best_model_score == 2.0, "that of the checkpoint resumed from, the newest"
    assert [one["score"] for one in saved(hook)] == [3.0, 2.0]


def test_another_metric_than_before_starts_afresh_and_leaves_the_old_ones(tmp_path, caplog):
    first = fit(tmp_path, Scores(4.0), ModelCheckpoint(1, "val/score"), max_epochs=1)
    hook = ModelCheckpoint(1, "val/loss")
    trainer = fit(tmp_path, hook, resume_from=first.run.path, max_epochs=3)
    assert "does not rank or remove the earlier checkpoints" in caplog.text
    assert steps(trainer)[0] == 3
    assert len(steps(trainer)) == 2


class ScoresByEpoch(hookline.Hook):
    def on_validation_end(self, metrics, epoch):
        metrics["val/score"] = (3.0, 1.0, 2.0)[epoch]


# -- CheckpointHook -------------------------------------------------------------------------------


def test_checkpoint_hook_keeps_the_newest(tmp_path):
    first = fit(tmp_path, CheckpointHook(keep=2), max_epochs=3)
    assert names(first) == ["epoch_0001", "epoch_0002"]
    trainer = fit(tmp_path, CheckpointHook(keep=2), max_epochs=5, resume_from=first.run.path)
    assert names(trainer) == ["epoch_0003", "epoch_0004"]


# -- weights only ---------------------------------------------------------------------------------


def files_of(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in path.iterdir()}


def has_weights(path: Path, model: torch.nn.Module) -> bool:
    found, expected = load_checkpoint(path).model, model.state_dict()
    return found.keys() == expected.keys() and same(
        [found[n] for n in expected], [*expected.values()]
    )


def info_of(path: Path) -> dict:
    return json.loads((path / "manifest.json").read_text())["info"]


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_with_weights_only_has_the_weights_and_little_else(tmp_path, background):
    settings = {"background": background}
    hooks = [
        ModelCheckpoint(save_weights_only=True, filename="weights", keep_last=3),
        ModelCheckpoint(filename="full", keep_last=3),
        hookline.EMA(0.9),
    ]
    trainer = fit(tmp_path, *hooks, max_epochs=2, checkpoints=settings)
    folder = trainer.run.checkpoints
    assert sorted(names(trainer)) == ["full", "full_2", "weights", "weights_2"]
    only, full = folder / "weights_2", folder / "full_2"
    assert files_of(only).keys() == files_of(full).keys()
    assert files_of(only)["model.safetensors"] == files_of(full)["model.safetensors"]
    assert files_of(only)["state.safetensors"] < 100 < files_of(full)["state.safetensors"]
    assert files_of(only)["state.json"] < files_of(full)["state.json"] / 2
    assert info_of(only) == {**info_of(full), "weights_only": True}
    loaded = load_checkpoint(only)
    assert has_weights(only, trainer.model)
    assert list(loaded.state) == ["hooks"]
    assert sorted(loaded.state["hooks"]) == ["model_checkpoint", "model_checkpoint_2"]
    assert (folder / "last").read_text() == "full_2\n"


def test_a_run_is_resumed_from_the_newest_checkpoint_with_all_of_the_state(tmp_path):
    def hooks():
        best = ModelCheckpoint(2, "val/score", save_weights_only=True, filename="best-{step}")
        return ScoresByEpoch(), best, ModelCheckpoint(filename="full-{step}", every_n_epochs=2)

    whole = fit(tmp_path / "whole", *hooks(), max_epochs=3)
    first = fit(tmp_path, *hooks(), max_epochs=3)
    folder = first.run.checkpoints
    assert names(first) == ["best-step=6", "full-step=6", "best-step=9"]
    assert find_checkpoint(first.run.path).name == "full-step=6"
    assert hookline.get_last_checkpoint(tmp_path / "runs").name == "full-step=6"
    remove_checkpoint(folder / "best-step=9")
    again = fit(tmp_path, *hooks(), max_epochs=3, resume_from=first.run.path)
    assert again.run.path == first.run.path
    assert sorted(names(again)) == sorted(names(whole))
    assert info_of(folder / "best-step=6")["weights_only"] is True
    assert same(weights(again.model), weights(whole.model))


@pytest.mark.parametrize("start", ["resume_from", "fork_from"])
def test_a_checkpoint_with_weights_only_cannot_be_resumed_from(tmp_path, start):
    hook = ModelCheckpoint(save_weights_only=True)
    first = fit(tmp_path, hook, max_epochs=1)
    trainer = trainer_of(tmp_path, ModelCheckpoint(save_weights_only=True))
    before = weights(trainer.model)
    with pytest.raises(CheckpointError, match=r"only the model's weights.*load_into.*run's folder"):
        trainer.fit(batches(3), **{start: hook.last_model_path})
    with pytest.raises(CheckpointError, match="No complete checkpoint to resume from"):
        trainer.fit(batches(3), **{start: first.run.path})
    assert same(weights(trainer.model), before)
    assert len(list((tmp_path / "runs").iterdir())) == 1, "no run was started"


def test_weights_only_work_in_a_bare_loop(tmp_path):
    def attach():
        model, optimizer = make(momentum=0.9)
        best = ModelCheckpoint(every_n_steps=2, filename="weights-{step}", save_weights_only=True)
        full = ModelCheckpoint(every_n_steps=4, filename="full-{step}")
        return model, optimizer, hookline.attach(model, optimizer, [best, full], runs=tmp_path)

    model, optimizer, session = attach()
    with pytest.raises(KeyboardInterrupt), session:
        train(model, optimizer, batches(7))
        raise KeyboardInterrupt
    folder = session.run.checkpoints
    assert sorted(p.name for p in complete_checkpoints(folder)) == [
        "full-step=4",
        "weights-step=6",
    ]
    only, full = files_of(folder / "weights-step=6"), files_of(folder / "full-step=4")
    assert only["model.safetensors"] == full["model.safetensors"]
    assert only["state.safetensors"] < 100 < full["state.safetensors"]
    model, optimizer, session = attach()
    with pytest.raises(CheckpointError, match="only the model's weights"):
        session.load_checkpoint(folder / "weights-step=6")
    assert session.load_checkpoint().path.name == "full-step=4"
    with session:
        train(model, optimizer, batches(8)[4:])
        path = session.save_checkpoint(tmp_path / "own", weights_only=True, wait=True)
        with pytest.raises(hookline.LoopError, match="extra"):
            session.save_checkpoint(weights_only=True, extra={"epoch": 1})
    assert sorted(p.name for p in complete_checkpoints(folder)) == ["full-step=8", "weights-step=8"]
    assert has_weights(path, model)
    assert has_weights(folder / "weights-step=8", model)


SHARDED = """
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import hookline
from hookline import ModelCheckpoint, Trainer, TrainerConfig

folder = Path(__file__).absolute().parent
data = [(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(6)]


def hooks():
    options = {"every_n_steps": 2, "save_last": True, "filename": "{step}"}
    only = ModelCheckpoint(save_weights_only=True, folder=folder / f"{kind}_only", **options)
    return only, ModelCheckpoint(folder=folder / f"{kind}_full", **options)


kind = "trainer"
model = torch.nn.Sequential(torch.nn.Linear(8, 4))
config = TrainerConfig(
    strategy="fsdp", fsdp={"wrap": ["Linear"]}, max_epochs=1, runs=None, progress="off"
)
optimizer = torch.optim.AdamW(model.parameters())
loss_fn = torch.nn.functional.mse_loss
Trainer(config, model, optimizer, hooks=hooks(), loss_fn=loss_fn).fit(data)

kind = "loop"
if not dist.is_initialized():
    dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 4))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
with hookline.attach(model, optimizer, hooks=hooks(), runs=None):
    for x, y in data[:3]:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="starts torchrun")
def test_sharded_weights_are_saved_by_all_ranks_without_their_optimizers(tmp_path):
    assert run_on_two_ranks(SHARDED, tmp_path).count("done") == 2
    for kind in ("trainer", "loop"):
        (only,), (full,) = (
            complete_checkpoints(tmp_path / f"{kind}_{n}") for n in ("only", "full")
        )
        assert only.name == full.name == "step=3"
        assert info_of(only) == {**info_of(full), "weights_only": True}
        sizes, all_sizes = files_of(only), files_of(full)
        assert sizes.keys() == all_sizes.keys() >= {"model-1.safetensors", "state-1.safetensors"}
        assert sizes["state-1.safetensors"] < 100 < all_sizes["state-1.safetensors"]
        found, expected = load_checkpoint(only).model, load_checkpoint(full).model
        assert found.keys() == expected.keys()
        assert same(list(found.values()), list(expected.values()))
