"""When TimeLimit ends training, and what it leaves behind."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from loops import batches, fit, make
from torch.nn import functional as F

import hookline
from hookline.hooks.optimization.time_limit import TimeLimit

SHORT = 0.02  # seconds


def train(*hooks, data=None, **options):
    return fit(*hooks, data=batches(6) if data is None else data, **options)


class Sleeps(hookline.Hook):
    """Sleeps before the first step is over, so that the limit is reached in it."""

    def on_before_forward(self):
        time.sleep(2 * SHORT)


def ends(trainer):
    return trainer.status, trainer.step


def test_training_ends_with_the_step_in_which_the_time_is_up():
    assert ends(train(Sleeps(), TimeLimit(SHORT))) == ("stopped", 1)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(1.5, 1.5), ("90", 90), ("1.5d", 129600), ("12:00:01", 43201), (timedelta(minutes=5), 300)],
)
def test_a_time_may_be_written_in_several_ways(given, seconds):
    assert TimeLimit(given)._limit == seconds


@pytest.mark.parametrize("given", ["", "soon", "12:00", "1:60:00", "5m and more", "nan", -1, True])
def test_a_time_that_cannot_be_read_is_an_error_with_what_can(given):
    with pytest.raises(hookline.ConfigError) as error:
        TimeLimit(given)
    assert f"'limit' is {given!r}" in str(error.value)
    assert "'12:00:00'" in str(error.value)


def test_the_time_of_validation_counts_and_no_step_follows():
    limit = TimeLimit("1h")

    class TakesAnHour(hookline.Hook):
        def on_validation_start(self):
            limit._end -= 3600

    trainer = train(TakesAnHour(), limit, val=batches(1), validate_every_steps=2)
    assert ends(trainer) == ("stopped", 2)


def test_a_checkpoint_is_saved_at_the_end(tmp_path):
    trainer = train(Sleeps(), TimeLimit(SHORT), runs=tmp_path)
    (saved,) = trainer.run.checkpoints.glob("step_*")
    assert saved.name == "step_000001"
    assert ends(train(TimeLimit("1h"), runs=tmp_path, resume_from=trainer.run.path)) == (
        "completed",
        6,
    )


def test_time_before_a_resume_does_not_count_otherwise(tmp_path):
    first = train(Sleeps(), TimeLimit(SHORT), runs=tmp_path)
    again = train(Sleeps(), TimeLimit(SHORT), runs=tmp_path, resume_from=first.run.path)
    assert ends(again) == ("stopped", 2)


def test_it_asks_an_unchanged_bare_loop_to_stop():
    model, optimizer = make()
    reasons = []
    with hookline.attach(model, optimizer, hooks=[TimeLimit(SHORT)]) as session:
        session.stop = reasons.append
        for x, y in batches(3):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            time.sleep(2 * SHORT)
            optimizer.step()
    assert len(reasons) == 1
    assert "the time limit of" in reasons[0]
    assert session.hooks.summary().failures == {}
