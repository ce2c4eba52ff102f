"""The event log of a run: in the trainer, in bare loops and in other libraries' trainers."""

import os
import signal

import pytest
import torch
from ignite_loops import run_ignite
from torch.nn import functional as F

import hookline
from hookline import Hook, Trainer, TrainerConfig


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8, 4, generator=generator) for _ in range(count)]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


class Fails(Hook):
    def on_step_end(self, step):
        raise ValueError(f"step {step}, https://user:hunter2@host")


class Director(Hook):
    """Skips the second step, turns a hook off and on again, and stops."""

    def on_before_optimizer_step(self, trainer, step):
        if step == 1 and not getattr(self, "has_skipped", False):
            self.has_skipped = True
            trainer.skip_optimizer_step(reason="the second step")

    def on_step_end(self, trainer, step):
        if step == 2:
            trainer.disable_hook("idle")
        if step == 3:
            trainer.enable_hook("idle")
        if step == 4:
            trainer.stop("that is enough")


class Idle(Hook):
    def on_step_end(self):
        pass


def hooks():
    return [Director(), Idle(), Fails()]


def fit(folder):
    config = TrainerConfig(max_steps=6, progress="off", runs=folder)
    trainer = Trainer(config, *parts(), loss_fn=F.mse_loss, hooks=hooks())
    return trainer.fit(batches(9)).run.path


def loop(folder):
    model, optimizer = parts()
    with hookline.attach(model, optimizer, hooks=hooks(), runs=folder) as session:
        for x, y in batches(9):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if session.should_stop:
                break
    return session.run.path


def ignite(folder):
    return run_ignite(folder, *parts(), batches(9), hooks())


@pytest.fixture(scope="module", params=[fit, loop, ignite])
def events(request, tmp_path_factory):
    path = request.param(tmp_path_factory.mktemp("runs"))
    return hookline.open_run(path).events()


def of_kind(events, kind):
    return [event for event in events if event["kind"] == kind]


def test_every_event_has_the_step_at_which_it_happened(events):
    assert [(event["kind"], event["step"]) for event in events] == [
        ("start", 0),
        ("hook_failed", 1),
        ("step_skipped", 1),
        ("hook_failed", 1),
        ("hooks", 2),
        ("hook_failed", 2),
        ("hooks", 2),
        ("hooks", 3),
        ("stop", 4),
        ("end", 4),
    ]


def test_toggles_name_the_hook_that_caused_them(events):
    by_director, by_failures, again = of_kind(events, "hooks")
    assert (by_director["hooks"], by_director["by"]) == ({"idle": "disabled"}, "director")
    assert (by_failures["hooks"], by_failures["by"]) == ({"fails": "failed"}, None)
    assert (again["hooks"], again["by"]) == ({"idle": "enabled"}, "director")


def test_skipped_steps_and_stops_have_their_reason(events):
    (skipped,) = of_kind(events, "step_skipped")
    assert (skipped["reason"], skipped["optimizer_idx"]) == ("the second step", 0)
    (stop,) = of_kind(events, "stop")
    assert (stop["reason"], stop["by"]) == ("that is enough", "director")
    (end,) = of_kind(events, "end")
    assert (end["status"], end["reason"]) == ("stopped", "that is enough")
    assert end["skipped_steps"] == 1


def test_failures_have_their_traceback_without_secrets(events):
    failures = of_kind(events, "hook_failed")
    assert [failure["failures"] for failure in failures] == [1, 2, 3]
    first = failures[0]
    assert (first["hook"], first["event"]) == ("fails", "on_step_end")
    assert first["error"].startswith("ValueError: step 1, https://***@host")
    assert 'raise ValueError(f"step {step}' in first["traceback"]
    assert "hunter2" not in str(failures)


def test_the_end_has_the_cost_of_each_hook_by_event(events):
    (end,) = of_kind(events, "end")
    costs = {hook["name"]: hook["costs"] for hook in end["hooks"]["hooks"]}
    assert set(costs["director"]) == {"on_before_optimizer_step", "on_step_end"}
    assert costs["director"]["on_step_end"]["calls"] == 5
    assert costs["director"]["on_step_end"]["seconds"] > 0
    assert costs["fails"]["on_step_end"]["calls"] == 3


def test_a_hook_that_fails_all_the_time_does_not_fill_the_log(tmp_path):
    class Often(Hook):
        def on_step_end(self, step):
            if step % 3:
                raise ValueError("again")

    config = TrainerConfig(max_steps=200, progress="off", runs=tmp_path)
    trainer = Trainer(config, *parts(), loss_fn=F.mse_loss, hooks=[Often()])
    trainer.fit(batches(200))
    failures = hookline.open_run(trainer.run.path).events("hook_failed")
    assert [failure["failures"] for failure in failures] == [*range(1, 21), 100]


def test_an_error_that_ends_training_is_in_the_end(tmp_path):
    class Broken(Hook):
        critical = True

        def on_step_end(self, step):
            if step == 2:
                raise ValueError("broken")

    trainer = Trainer(
        TrainerConfig(progress="off", runs=tmp_path),
        *parts(),
        loss_fn=F.mse_loss,
        hooks=[Broken()],
    )
    with pytest.raises(hookline.HookFailedError):
        trainer.fit(batches(5))
    *_, failed, end = hookline.open_run(trainer.run.path).events()
    assert (failed["kind"], failed["hook"], failed["step"]) == ("hook_failed", "broken", 2)
    assert (end["kind"], end["status"], end["step"]) == ("end", "error", 2)
    assert end["error"].startswith("HookFailedError: The hook 'broken' failed")
    assert "ValueError: broken" in end["traceback"]


def test_preemption_and_resuming_are_events(tmp_path):
    class Preempt(Hook):
        def on_step_end(self, step):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    def make():
        config = TrainerConfig(progress="off", runs=tmp_path, seed=0)
        return Trainer(config, *parts(), loss_fn=F.mse_loss, hooks=[Preempt()])

    first = make().fit(batches(4))
    assert first.status == "preempted"
    make().fit(batches(4), resume_from=first.run.path)
    events = hookline.open_run(first.run.path).events()
    assert [(event["kind"], event.get("step")) for event in events] == [
        ("start", 0),
        ("signal", 2),
        ("checkpoint", 2),
        ("end", 2),
        ("start", 2),
        ("end", 4),
    ]
    assert events[1]["signal"] == "SIGTERM"
    assert events[3]["status"] == "preempted"
    assert events[4]["resumed_from"].endswith("step_000002")
