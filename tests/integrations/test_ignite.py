"""The same hooks in a real Ignite engine."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import signal
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Loss, RunningAverage
from loops import ALL_EVENTS, batches, fit, make, recorder, same, snapshot, told_in, weights
from torch import nn
from torch.nn import functional as F

import hookline
from hookline.integrations.ignite import LIBRARY as HOST

logging.getLogger("ignite").setLevel(logging.CRITICAL)

TRAIN, VAL = batches(4), batches(2, seed=7)
VALIDATION = ("on_validation_start", "on_validation_end")


class Training:
    """A model, its optimizer, the engine that trains it and the one that validates it."""

    def __init__(
        self,
        accumulate: int = 1,
        clip: float | None = None,
        scaler: Any = None,
        validates: str = "epoch",
    ) -> None:
        self.model, self.optimizer = make()
        self.accumulate, self.clip, self.scaler = accumulate, clip, scaler
        self.trainer = Engine(self.train_step)
        self.evaluator = Engine(self.validate)
        Loss(nn.MSELoss()).attach(self.evaluator, "loss")
        if validates == "epoch":
            self.trainer.add_event_handler(
                Events.EPOCH_COMPLETED, lambda: self.evaluator.run(VAL) and None
            )

    def train_step(self, engine: Engine, batch: Any) -> float:
        self.model.train()
        loss = F.mse_loss(self.model(batch[0]), batch[1]) / self.accumulate
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
        if engine.state.iteration % self.accumulate == 0:
            if self.clip is not None:
                if self.scaler is not None:
                    self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
        return loss.item() * self.accumulate

    def validate(self, engine: Engine, batch: Any) -> Any:
        self.model.eval()
        with torch.no_grad():
            return self.model(batch[0]), batch[1]

    def attach(self, *hooks: hookline.Hook, **options: Any) -> Any:
        options = {"runs": None, "evaluator": self.evaluator, **options}
        return hookline.attach(
            self.trainer, model=self.model, optimizer=self.optimizer, hooks=hooks, **options
        )

    def run(self, epochs: int = 2) -> Training:
        self.trainer.run(TRAIN, max_epochs=epochs)
        return self


EVENTS_OF_A_RUN = [
    event
    for event in ALL_EVENTS
    if event
    not in (
        "on_before_backward",
        "on_step_skipped",
        "on_exception",
        "on_checkpoint_save",
        "on_checkpoint_load",
    )
]


class Numbers(hookline.Hook):
    """Keeps the numbers that every loop has to give alike."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.gradients: list[torch.Tensor] = []
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def on_gradients_ready(self, model):
        self.gradients += [p.grad.clone() for p in model.parameters()]

    def on_train_batch_end(self, epoch, batch_idx, batch, loss):
        self.batches.append((epoch, batch_idx, batch[0].sum().item(), loss))

    def on_step_end(self, step, loss, grad_norm, lr):
        self.steps.append((step, loss, grad_norm, lr))

    def on_validation_end(self, metrics):
        self.epochs.append(("val", float(metrics["val/loss"])))

    def on_epoch_end(self, epoch, metrics):
        self.epochs.append((epoch, float(metrics["train/loss"]), float(metrics["val/loss"])))


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.5)])
def test_events_numbers_gradients_and_weights_are_those_of_our_trainer(accumulate, clip):
    told, numbers = recorder(*EVENTS_OF_A_RUN), Numbers()
    training = Training(accumulate, clip)
    training.attach(told, numbers, allow_missing=clip is None)
    training.run()

    own_told, own = recorder(*EVENTS_OF_A_RUN), Numbers()
    trainer = fit(
        *(own_told, own),
        **{"data": TRAIN, "val": VAL, "max_epochs": 2, "accumulate": accumulate, "clip_norm": clip},
        loss_fn=F.mse_loss,
    )
    assert told.told == own_told.told
    assert numbers.steps == [pytest.approx(row, rel=1e-6) for row in own.steps]
    assert same(numbers.gradients, own.gradients)
    assert numbers.batches == [pytest.approx(row, rel=1e-6) for row in own.batches]
    assert [e[0] for e in numbers.epochs] == [e[0] for e in own.epochs]
    assert numbers.epochs[-1][1:] == pytest.approx(own.epochs[-1][1:], rel=1e-6)
    assert same(weights(training.model), weights(trainer.model))
    plain = Training(accumulate, clip).run()
    assert same(weights(training.model), weights(plain.model))


def test_the_table_names_a_place_for_every_event():
    assert [event for event, where in HOST.rows() if where is None] == []


def test_everything_is_removed_after_a_run():
    training = Training(clip=0.5)
    before = snapshot(training.model)
    handlers = {
        engine: {event: list(own) for event, own in engine._event_handlers.items()}
        for engine in (training.trainer, training.evaluator)
    }
    session = training.attach(recorder(*EVENTS_OF_A_RUN))
    assert "run" in vars(training.trainer)
    training.run()
    assert session.status == "completed"
    assert "run" not in vars(training.trainer)
    training.model.train()
    assert snapshot(training.model) == before
    for engine, own in handlers.items():
        now = {event: list(left) for event, left in engine._event_handlers.items() if left}
        assert now == {event: left for event, left in own.items() if left}
    assert not training.trainer.has_event_handler(print, Events.EXCEPTION_RAISED)
    with pytest.raises(ZeroDivisionError):  # no handler of ours keeps it from being raised
        Engine(lambda engine, batch: 1 / 0).run([1])


class CopiesEngine:
    """A handler that copies its engine, and a function that trains."""

    def __init__(self) -> None:
        self.model, self.optimizer = make()
        self.copies: list[Any] = []
        self.engine: Any = None

    def __call__(self, engine: Engine, batch: Any) -> float:
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def copy(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            self.copies += [copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))]


def test_an_engine_with_hooks_is_copied_and_pickled_without_them(caplog, monkeypatch):
    monkeypatch.setattr(Engine, "interrupt_resume_enabled", False)  # or a generator is not copied
    step, told = CopiesEngine(), recorder("on_step_end", "on_train_end")
    engine = Engine(step)
    engine.add_event_handler(Events.ITERATION_COMPLETED, step.copy)
    hookline.attach(engine, model=step.model, optimizer=step.optimizer, hooks=[told], runs=None)
    step.engine = engine
    step.copy()
    assert caplog.text.count("has no hooks") == 2
    copies, step.copies = step.copies, []
    step.engine = engine
    engine.run(TRAIN)
    assert caplog.text.count("has no hooks") == 4
    copies += [*step.copies, copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))]
    assert caplog.text.count("has no hooks") == 4  # there is nothing to miss
    assert told.told == ["on_step_end"] * 4 + ["on_train_end"]
    for copied in copies:
        copied.state.iteration = copied.state.epoch = 0
        copied.run(TRAIN, max_epochs=1)
        assert copied.state.iteration == 4
    assert told.told == ["on_step_end"] * 4 + ["on_train_end"]


def test_a_handler_of_validation_that_is_registered_later_comes_before_on_epoch_end_too():
    training = Training(validates="later")
    told = recorder("on_epoch_end", *VALIDATION)
    training.attach(told)

    @training.trainer.on(Events.EPOCH_COMPLETED)
    def validate():
        training.evaluator.run(VAL)

    training.run()
    assert told.told == [*VALIDATION, "on_epoch_end"] * 2


def test_a_validation_within_an_epoch_ends_the_batch_first():
    training = Training(accumulate=2, validates="within")
    told = recorder("on_train_batch_end", "on_train_batch_start", *VALIDATION)
    training.attach(told)

    @training.trainer.on(Events.ITERATION_COMPLETED(every=3))
    def validate():
        training.evaluator.run(VAL)

    training.run(epochs=1)
    batch = ["on_train_batch_start", "on_train_batch_end"]
    assert told.told == [*batch * 3, *VALIDATION, *batch]


def test_hooks_that_need_validation_are_refused_without_an_evaluator():
    training = Training(validates="never")
    with pytest.raises(hookline.NotSuppliedError, match=r"evaluator=evaluator"):
        training.attach(recorder(*VALIDATION), evaluator=None)
    assert "run" not in vars(training.trainer)
    told = recorder("on_train_start", *VALIDATION)
    training.attach(told, evaluator=None, allow_missing=True)
    training.run(1)
    assert told.told == ["on_train_start"]


def test_the_loss_before_backward_needs_a_call_in_the_process_function():
    training = Training()
    training.attach(recorder("on_before_backward"))
    with pytest.raises(hookline.NotSuppliedError, match=r"session\.backward\(loss\)"):
        training.run()
    training = Training()
    told = recorder("on_before_backward", "on_step_end")
    training.attach(told, allow_missing=True)
    training.run(1)
    assert told.told == ["on_step_end"] * 4

    model, optimizer = make()

    def step(engine, batch):
        session.backward(F.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()

    told = recorder(on_before_backward=("loss",))
    engine = Engine(step)
    session = hookline.attach(engine, model=model, optimizer=optimizer, hooks=[told])
    engine.run(TRAIN)
    assert len(told_in(told, "on_before_backward")) == 4


# -- stopping -------------------------------------------------------------------------------------


def test_a_hook_stops_the_engine():
    class Stop(hookline.Hook):
        def on_step_end(self, step, trainer):
            if step == 3:
                trainer.stop("enough")

    training = Training()
    session = training.attach(Stop())
    training.run()
    assert (training.trainer.state.iteration, session.step, session.status) == (3, 3, "stopped")


def test_early_stopping_ends_training_after_the_epoch():
    training = Training()
    stopping = hookline.EarlyStopping(patience=1, min_delta=1e9)
    told = recorder("on_epoch_end", "on_train_end")
    session = training.attach(stopping, told)
    training.run(epochs=9)
    assert told.told == ["on_epoch_end", "on_epoch_end", "on_train_end"]
    assert session.status == "stopped"


def test_an_engine_that_terminates_itself_has_stopped():
    training = Training()
    told = recorder(on_train_end=("status",))
    training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=2), lambda: training.trainer.terminate()
    )
    training.attach(told)
    training.run()
    assert told.told == [("on_train_end", {"status": "stopped"})]


def test_an_interrupted_engine_continues_with_the_same_session():
    training = Training()
    told = recorder("on_train_start", "on_train_end", on_step_end=("step",))
    session = training.attach(told)
    trainer = training.trainer
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.interrupt())
    training.run(1)
    assert (session.step, session.is_training) == (2, True)
    training.run(1)
    assert told.told[0] == "on_train_start"
    assert [row["step"] for row in told_in(told, "on_step_end")] == [1, 2, 3, 4]
    assert told.told[-1] == "on_train_end"
    assert same(weights(training.model), weights(Training().run(1).model))


def test_an_epoch_that_is_left_early_ends():
    training = Training(validates="never")
    told = recorder("on_epoch_start", "on_epoch_end")
    training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=2),
        lambda: training.trainer.terminate_epoch(skip_epoch_completed=True),
    )
    training.attach(told)
    training.run()
    assert told.told == ["on_epoch_start", "on_epoch_end"] * 2


def test_a_signal_ends_training_after_the_iteration():
    training = Training()
    told = recorder(on_train_end=("status",))
    session = training.attach(told)
    training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=2), lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    training.run()
    assert training.trainer.state.iteration <= 3
    assert (session.received_signal, session.status) == ("SIGTERM", "preempted")
    assert told.told == [("on_train_end", {"status": "preempted"})]


def test_ctrl_c_is_raised_after_the_iteration():
    training = Training()
    session = training.attach(recorder("on_step_end"))
    training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=1), lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        training.run()
    assert session.status == "interrupted"


@pytest.mark.parametrize("handled", [False, True])
def test_an_exception_reaches_hooks(handled):
    training = Training()
    told = recorder("on_train_end", on_exception=("exception",))
    if handled:
        training.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    session = training.attach(told)

    @training.trainer.on(Events.ITERATION_COMPLETED(once=2))
    def fail():
        raise ZeroDivisionError("of the user")

    if handled:
        training.run()
    else:
        with pytest.raises(ZeroDivisionError, match="of the user"):
            training.run()
    assert session.status == "error"
    assert str(told.told[0][1]["exception"]) == "of the user"
    assert told.told[1:] == ["on_train_end"]
    assert "run" not in vars(training.trainer)


def test_a_failing_hook_does_not_stop_training_and_a_critical_one_does():
    class Failing(hookline.Hook):
        def on_train_batch_start(self):
            raise ValueError("a hook fails")

    training = Training()
    session = training.attach(Failing())
    training.run()
    assert session.hooks.describe()[0].status != "enabled"
    assert same(weights(training.model), weights(Training().run().model))

    class Critical(Failing):
        critical = True

    training = Training()
    training.attach(Critical())
    with pytest.raises(hookline.HooklineError, match="a hook fails"):
        training.run()


# -- parts ----------------------------------------------------------------------------------------


def test_a_scaler_gives_unscaled_gradients_and_skipped_steps():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    training, numbers = Training(clip=0.5, scaler=scaler), Numbers()
    skipped = recorder(on_step_skipped=("reason",))
    session = training.attach(numbers, skipped, scaler=scaler)

    @training.trainer.on(Events.ITERATION_STARTED(once=2))
    def overflow():
        training.trainer.state.batch = [training.trainer.state.batch[0] * 1e38, TRAIN[1][1]]

    training.run(1)
    plain = Numbers()
    other = Training(clip=0.5)
    other.attach(plain)
    other.run(1)
    assert numbers.steps[0] == pytest.approx(plain.steps[0], rel=1e-5)
    assert [row["reason"] for row in told_in(skipped, "on_step_skipped")] == [
        "the scaler found non-finite gradients"
    ]
    assert session.step == 3


def test_two_optimizers_and_a_scheduler():
    model, _ = make()
    optimizers = [
        torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.first, model.second)
    ]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5)
    told = recorder(on_before_optimizer_step=("optimizer_idx",), on_step_end=("step", "lr"))

    def step(engine, batch):
        F.mse_loss(model(batch[0]), batch[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()

    engine = Engine(step)
    session = hookline.attach(
        engine, model=model, optimizer=optimizers, hooks=[told], schedulers=scheduler
    )
    engine.run(TRAIN[:2])
    assert session.schedulers == [scheduler]
    idxs = [row["optimizer_idx"] for row in told_in(told, "on_before_optimizer_step")]
    assert idxs == [0, 1, 0, 1]
    assert [row["lr"] for row in told_in(told, "on_step_end")] == [0.1, 0.05]


def test_an_update_a_probe_and_a_toggle():
    class Toggle(hookline.Hook):
        def on_step_end(self, step, trainer):
            trainer.enable_hook("recorder") if step == 2 else trainer.disable_hook("recorder")

    training = Training()
    told = recorder(on_train_batch_start=("batch_idx",))
    session = training.attach(told, Toggle())
    capture = hookline.probes.Capture("second")
    session.add_hook(capture)
    session.add_hook(_double, kind="update")
    training.run(1)
    assert len(capture.states()) == 4  # not those of the validation
    assert [row["batch_idx"] for row in told_in(told, "on_train_batch_start")] == [0, 2]
    assert not same(weights(training.model), weights(Training().run(1).model))


def _double(gradients):
    return {name: gradient * 2 for name, gradient in gradients.items()}


def test_what_is_given_wrongly_is_refused():
    training = Training()
    trainer, model, optimizer = training.trainer, training.model, training.optimizer
    for given, message in (
        ({}, "neither the model nor the optimizer"),
        ({"model": model}, "neither the model nor the optimizer"),
        ({"model": model, "optimizer": optimizer, "evaluator": model}, "validates, not"),
        ({"model": model, "optimizer": optimizer, "evaluator": trainer}, "engine that trains"),
        ({"model": model, "optimizer": optimizer, "on_stop": "raise"}, "takes no 'on_stop'"),
    ):
        with pytest.raises(hookline.ArgumentError, match=message):
            hookline.attach(trainer, hooks=[], **given)
    with pytest.raises(hookline.ArgumentError, match="takes no 'evaluator'"):
        hookline.attach(model, optimizer, hooks=[], evaluator=training.evaluator)


# -- metrics --------------------------------------------------------------------------------------


def test_metrics_go_both_ways(tmp_path):
    class Logs(hookline.Hook):
        def on_step_end(self, step, trainer):
            trainer.log("hook/value", torch.tensor(float(step)))

    training = Training()
    RunningAverage(output_transform=lambda loss: loss).attach(training.trainer, "running")
    seen: list[Any] = []
    training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: seen.append(float(training.trainer.state.metrics["hook/value"])),
    )
    told = recorder(on_validation_end=("metrics",), on_epoch_end=("metrics",))
    session = training.attach(Logs(), told, runs=tmp_path)
    training.run(1)
    assert seen == [1.0, 2.0, 3.0, 4.0]  # in the iteration in which it was logged
    validated = told_in(told, "on_validation_end")[0]["metrics"]
    assert validated["loss"] == validated["val/loss"] == training.evaluator.state.metrics["loss"]
    epoch = told_in(told, "on_epoch_end")[0]["metrics"]
    assert epoch["train/running"] == training.trainer.state.metrics["running"]
    assert epoch["val/loss"] == validated["val/loss"]
    assert "train/hook/value" not in epoch
    lines = (session.run.path / "metrics.jsonl").read_text().splitlines()
    names = {json.loads(line).get("name") for line in lines}
    assert {"train/loss", "val/loss", "running", "hook/value"} <= names


# -- checkpoints ----------------------------------------------------------------------------------


class Counts(hookline.Hook):
    """A hook with state, of every type that a checkpoint holds."""

    def __init__(self) -> None:
        self.steps, self.epochs = 0, 0
        self.total = torch.zeros(2)
        self.seen: set[int] = set()

    def on_step_end(self, step):
        self.steps += 1
        self.total += step
        self.seen.add(step)

    def on_epoch_end(self):
        self.epochs += 1

    def state_dict(self):
        return {"counts": (self.steps, self.epochs), "total": self.total, "seen": self.seen}

    def load_state_dict(self, state):
        (self.steps, self.epochs), self.total = state["counts"], state["total"].clone()
        self.seen = state["seen"]


def objects(training: Training, session: Any) -> dict[str, Any]:
    return {
        "trainer": training.trainer,
        "model": training.model,
        "optimizer": training.optimizer,
        "hooks": session,
    }


@pytest.mark.parametrize("where", ["trainer", "evaluator", "iterations"])
def test_a_resumed_training_continues_hooks_and_run(where, tmp_path):
    def start(*hooks):
        training = Training()
        session = training.attach(*hooks, runs=tmp_path / "runs")
        to_save = objects(training, session)
        handler = Checkpoint(
            to_save,
            DiskSaver(str(tmp_path / "saved"), create_dir=True, require_empty=False),
            n_saved=None,
            global_step_transform=lambda *_: training.trainer.state.iteration,
        )
        if where == "trainer":
            training.trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)
        elif where == "evaluator":
            training.evaluator.add_event_handler(Events.COMPLETED, handler)
        else:
            training.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=3), handler)
        return training, session, to_save

    told = recorder(on_checkpoint_save=("path", "step"), on_epoch_end=("epoch",))
    whole, full_session, _ = start(Counts(), told)
    whole.run(3)
    saved = told_in(told, "on_checkpoint_save")
    steps = [3, 6, 9, 12] if where == "iterations" else [4, 8, 12]
    assert [row["step"] for row in saved] == steps
    path = tmp_path / "saved" / f"checkpoint_{steps[0]}.pt"
    assert saved[0]["path"] == str(path)
    assert path.is_file()

    counts = Counts()
    told = recorder(
        on_checkpoint_load=("path", "step"),
        on_epoch_start=("epoch",),
        on_train_batch_start=("batch_idx",),
    )
    resumed, session, to_load = start(counts, told)
    Checkpoint.load_objects(to_load, path)  # with weights_only=True
    resumed.trainer.run(TRAIN, max_epochs=3)
    assert told.told[0] == ("on_checkpoint_load", {"path": str(path), "step": steps[0]})
    assert told.told[1] == ("on_epoch_start", {"epoch": 0 if where == "iterations" else 1})
    expected = 3 if where == "iterations" else 0
    assert told.told[2] == ("on_train_batch_start", {"batch_idx": expected})
    assert counts.state_dict()["counts"] == (12, 3)
    assert counts.seen == set(range(1, 13))
    assert session.step == 12
    assert session.run.id == full_session.run.id


def test_an_engine_that_continues_after_an_epochs_last_iteration_ends_this_epoch(tmp_path):
    def start(folder):
        training, told = Training(), recorder(on_epoch_end=("epoch", "metrics"))
        session = training.attach(told)
        handler = Checkpoint(
            objects(training, session), DiskSaver(str(tmp_path / folder)), n_saved=None
        )
        training.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=4), handler)
        return training, session, told

    def ends(told):
        return [
            (end["epoch"], end["metrics"]["train/loss"]) for end in told_in(told, "on_epoch_end")
        ]

    whole, _, told = start("whole")
    whole.run(3)
    resumed, session, told_again = start("resumed")
    Checkpoint.load_objects(objects(resumed, session), tmp_path / "whole" / "checkpoint_4.pt")
    resumed.trainer.run(TRAIN, max_epochs=3)
    assert (
        [epoch for epoch, _ in ends(told_again)] == [epoch for epoch, _ in ends(told)] == [0, 1, 2]
    )
    assert ends(told_again)[0] == ends(told)[0]  # later ones have other random numbers


def test_an_engine_that_continues_without_its_hooks_warns(caplog):
    training = Training()
    training.attach(Counts())
    training.trainer.load_state_dict({"iteration": 4, "max_epochs": 2, "epoch_length": 4})
    with caplog.at_level(logging.WARNING, "hookline"):
        training.trainer.run(TRAIN)
    assert "start anew, at step 0" in caplog.text


def test_a_damaged_state_is_refused():
    training = Training()
    session = training.attach(Counts())
    with pytest.raises(hookline.CheckpointError, match=r"session\.state_dict\(\) returned"):
        session.load_state_dict({"hooks": {}})
    with pytest.raises(hookline.CheckpointError, match="is not that of"):
        session.load_state_dict({"version": 1, "state": "{}", "tensors": {}})


def test_values_logged_after_a_micro_batch_belong_to_its_step(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(engine, batch):
        (model(batch).sum() / 2).backward()
        if engine.state.iteration % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    engine = Engine(step)
    session = hookline.attach(engine, model=model, optimizer=optimizer, hooks=[], runs=tmp_path)

    @engine.on(Events.EPOCH_STARTED)
    def add_handler():  # after Hookline's own
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: session.log("x", 1.0))

    engine.run([torch.ones(1, 2)] * 6, max_epochs=1)
    (run,) = tmp_path.iterdir()
    values = hookline.open_run(run).metrics("train/x")
    assert [value["step"] for value in values] == [1, 1, 2, 2, 3, 3]
