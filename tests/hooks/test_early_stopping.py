"""EarlyStopping: when training ends, and with which reason."""

from __future__ import annotations

import json
import math

import loops
import pytest
import torch
from loops import batches, make
from torch.nn import functional as F

import hookline
from hookline import HookFailedError, Trainer
from hookline.hooks.checkpointing.checkpoint_hook import CheckpointHook
from hookline.hooks.optimization.early_stopping import EarlyStopping


class Scores(hookline.Hook):
    """Puts a number of our choice among the metrics of each validation, or of each epoch."""

    def __init__(self, *scores, name="val/loss", at="validation"):
        self.scores, self.metric, self.at = list(scores), name, at

    def on_validation_end(self, metrics):
        self.put("validation", metrics)

    def on_epoch_end(self, metrics):
        self.put("epoch", metrics)

    def put(self, where, metrics):
        if where == self.at and self.scores:
            metrics[self.metric] = self.scores.pop(0)


def fit(tmp_path, *hooks, validate=True, **options) -> Trainer:
    options = {"runs": tmp_path / "runs", "max_epochs": 10} | options
    val = batches(1, seed=2) if validate else None
    return loops.fit(*hooks, data=batches(2), val=val, **options)


def reason(trainer: Trainer) -> str | None:
    lines = (trainer.run.path / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["kind"] == "end"][-1]["reason"]


def epochs(trainer: Trainer) -> int:
    return trainer.step // 2


IMPROVES_TWICE = (5.0, 4.0, 4.5, 4.2, 4.1, 4.3, 1.0)


@pytest.mark.parametrize(("patience", "expected"), [(1, 3), (2, 4), (4, 6)])
def test_patience_counts_checks_without_an_improvement(tmp_path, patience, expected):
    hook = EarlyStopping(patience=patience)
    trainer = fit(tmp_path, Scores(*IMPROVES_TWICE), hook)
    assert epochs(trainer) == expected
    assert trainer.status == "stopped"
    assert hook.best_score == 4.0
    assert hook.wait_count == patience


@pytest.mark.parametrize("at", ["validation", "epoch"])
def test_the_epoch_in_which_it_stopped_is_known_also_after_resuming(tmp_path, at):
    options = {"patience": 2, "check_on_train_epoch_end": at == "epoch"}
    hook = EarlyStopping(**options)
    scores = Scores(*IMPROVES_TWICE, at=at)
    trainer = fit(tmp_path, scores, hook, CheckpointHook())
    assert (epochs(trainer), hook.stopped_epoch) == (4, 3)
    again = EarlyStopping(**options)
    loops.fit(
        again,
        data=batches(2),
        val=batches(1, seed=2),
        runs=tmp_path / "runs",
        max_epochs=10,
        resume_from=trainer.run.path,
    )
    assert again.stopped_epoch == 3


@pytest.mark.parametrize(("min_delta", "expected"), [(0.0, 5), (0.5, 3)])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_min_delta_is_what_counts_as_an_improvement(tmp_path, min_delta, expected, mode):
    sign = 1 if mode == "min" else -1
    scores = Scores(*(sign * s for s in (5.0, 4.75, 4.5, 4.5, 4.5, 4.5)))
    hook = EarlyStopping(patience=2, min_delta=min_delta, mode=mode)
    assert epochs(fit(tmp_path, scores, hook)) == expected


def test_what_is_missing_is_an_error_that_lists_what_there_is(tmp_path):
    with pytest.raises(HookFailedError) as error:
        fit(tmp_path, EarlyStopping("val/los"))
    assert "'val/los', which is missing. Did you mean 'val/loss'?" in str(error.value)
    assert str(error.value).endswith("The metrics are: 'val/loss'.")


def test_what_is_missing_is_left_out_when_not_strict(tmp_path, caplog):
    trainer = fit(tmp_path, EarlyStopping("val/los", strict=False), max_epochs=5)
    assert trainer.status == "completed"
    assert [r.getMessage() for r in caplog.records if "'val/los'" in r.getMessage()] == [
        "EarlyStopping: the metric 'val/los' is missing; the check is skipped."
    ]


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_logs_every_check(tmp_path, caplog, verbose):
    caplog.set_level("INFO", "hookline")
    fit(tmp_path, Scores(2.0, 1.0, 3.0), EarlyStopping(patience=1, verbose=verbose))
    checks = [r.getMessage() for r in caplog.records if "at step" in r.getMessage()]
    assert any("stops training at step 6" in line for line in checks)
    assert len(checks) == (4 if verbose else 1)
    if verbose:
        assert checks[1].endswith("the best is 1, 0 of 1 checks without an improvement.")


@pytest.mark.parametrize(
    ("mode", "threshold", "scores"),
    [("min", 1.5, (2.0, 1.5, 1.4, 1.0)), ("max", 0.9, (0.8, 0.9, 0.95, 0.99))],
)
def test_training_ends_when_the_metric_is_good_enough(tmp_path, mode, threshold, scores):
    hook = EarlyStopping(mode=mode, patience=9, stopping_threshold=threshold)
    trainer = fit(tmp_path, Scores(*scores), hook)
    assert epochs(trainer) == 3
    assert reason(trainer) == (
        f"EarlyStopping: val/loss is {scores[2]:g}, which is better than {threshold:g}."
    )
    assert hook.best_score == scores[2]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_ends_training(tmp_path, bad):
    hook = EarlyStopping(patience=3)
    trainer = fit(tmp_path, Scores(1.0, bad, bad, bad), hook)
    assert epochs(trainer) == 2
    assert reason(trainer) == f"EarlyStopping: val/loss is {bad}."
    assert hook.best_score == 1.0


@pytest.mark.parametrize("sanity", [False, True])
def test_a_resumed_run_ends_where_the_whole_would_have(tmp_path, sanity):
    def hooks(scores):
        return Scores(*scores), EarlyStopping(patience=4), CheckpointHook()

    whole = fit(tmp_path / "whole", *hooks(IMPROVES_TWICE))
    first = fit(tmp_path, *hooks(IMPROVES_TWICE[:4]), max_epochs=4)
    again = hooks(IMPROVES_TWICE[4:])
    trainer = fit(tmp_path, *again, resume_from=first.run.path, sanity=sanity)
    assert epochs(trainer) == epochs(whole) == 6
    assert reason(trainer) == reason(whole)


def test_a_run_killed_after_the_stop_was_requested_stops_again(tmp_path):
    hooks = (Scores(*[5.0] * 9), EarlyStopping(patience=2), CheckpointHook())
    whole = fit(tmp_path, *hooks)
    assert (whole.status, epochs(whole)) == ("stopped", 3)
    last = hookline.open_run(whole.run.path).checkpoints()[-1]  # saved with the request
    again = fit(tmp_path, Scores(), EarlyStopping(patience=2), resume_from=last.path)
    assert (again.status, again.step, reason(again)) == ("stopped", whole.step, reason(whole))
    assert again.epoch == whole.epoch
    more = fit(tmp_path, Scores(*[4.0] * 9), EarlyStopping(patience=3), resume_from=last.path)
    assert more.step > whole.step  # more patience than before: it goes on


# -- in a bare loop -------------------------------------------------------------------------------


def bare(hook, scores, *, through_session=True):
    model, optimizer = make()
    done = 0
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        with session.validation():  # before training
            session.log("loss", 0.0)
        data = batches(len(scores))
        for i, (x, y) in enumerate(session.batches(data) if through_session else data):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            done += 1
            with session.validation(), torch.no_grad():
                session.log("loss", torch.tensor(scores[i]))
    return done, session


def test_a_bare_loop_is_stopped_too():
    hook = EarlyStopping(patience=2)
    done, session = bare(hook, (3.0, 2.0, 4.0, 4.0, 4.0, 4.0))
    assert done == 4
    assert session.status == "stopped"
    assert hook.best_score == 2.0


def test_a_bare_loop_that_never_looks_gets_a_warning_and_the_request_stays(caplog):
    hook = EarlyStopping(patience=1)
    done, session = bare(hook, (3.0, 4.0, 4.0, 4.0), through_session=False)
    assert done == 4
    assert session.should_stop
    assert session.status == "completed"  # the loop went to its end
    assert caplog.text.count("should_stop") == 1
    assert session.hooks.describe()[0].status == "enabled"
