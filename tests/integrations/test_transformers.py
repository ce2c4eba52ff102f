"""Hooks in a real Hugging Face Trainer, and in TRL's trainers."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import hookline
from hookline.errors import ArgumentError, LoopError, NotSuppliedError
from hookline.events import EVENTS
from hookline.integrations.transformers import LIBRARY as HOST
from hookline.integrations.transformers import HooklineCallback

VOCABULARY = 50


def make_data(n: int = 16) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(0, VOCABULARY, (n, 8), generator=generator)
    return [{"input_ids": ids, "labels": ids.clone()} for ids in sequences]


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    sizes = {"n_positions": 32, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **ids))


def make_trainer(folder: Path, model: nn.Module | None = None, **options: Any) -> Trainer:
    """Return a trainer of 8 steps with two batches each, in two epochs."""
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": True,
        "max_grad_norm": 1.0,
        "learning_rate": 1e-2,
    }
    callbacks = options.pop("callbacks", None)
    args = TrainingArguments(
        str(folder),
        **{**defaults, **options},
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(
        model or make_model(),
        args,
        train_dataset=make_data(),
        eval_dataset=make_data(4),
        callbacks=callbacks,
    )


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [value.clone() for value in trainer.model.state_dict().values()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def records(session: Any, name: str) -> list[tuple[int, Any]]:
    lines = (session.run.path / "metrics.jsonl").read_text().splitlines()
    found = (json.loads(line) for line in lines)
    return [(record["step"], record["value"]) for record in found if record["name"] == name]


class Watch(hookline.Hook):
    """Notes events, with some of their arguments."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[float] = []

    def on_train_start(self):
        self.events.append("train")

    def on_epoch_start(self, epoch):
        self.events.append(f"epoch {epoch}")

    def on_train_batch_start(self, batch, batch_idx):
        assert batch["input_ids"].shape == (2, 8)
        self.events.append(f"batch {batch_idx}")

    def on_train_batch_end(self, batch_idx, loss):
        self.events.append(f"end {batch_idx}")

    def on_gradients_ready(self, model):
        self.gradients.append(float(norm_of(model)))

    def on_gradient_clip(self, grad_norm):
        self.norms.append(grad_norm)

    def on_step_end(self, step, loss, tokens_seen, model):
        assert float(norm_of(model)) <= 1.001
        self.losses.append(loss)
        self.events.append(f"step {step}, {tokens_seen} tokens")

    def on_validation_start(self):
        self.events.append("validation")

    def on_validation_batch_end(self, batch_idx, loss):
        self.events.append(f"validated {batch_idx}")

    def on_validation_end(self, metrics):
        assert metrics["val/loss"] == metrics["eval_loss"]
        self.events.append("validation ends")

    def on_epoch_end(self, epoch, metrics):
        self.events.append(f"epoch {epoch} ends")

    def on_checkpoint_save(self, checkpoint_path):
        self.events.append(Path(checkpoint_path).name)

    def on_checkpoint_load(self, checkpoint_path, step):
        self.events.append(f"loaded {Path(checkpoint_path).name} of step {step}")

    def on_exception(self, exception):
        self.events.append(type(exception).__name__)

    def on_train_end(self, status):
        self.events.append(status)

    def state_dict(self):
        return {"losses": list(self.losses)}

    def load_state_dict(self, state):
        self.losses = list(state["losses"])


def norm_of(model: nn.Module) -> torch.Tensor:
    return torch.linalg.vector_norm(
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A training without Hookline: its weights and log."""
    trainer = make_trainer(tmp_path_factory.mktemp("plain"), eval_strategy="epoch")
    trainer.train()
    return trainer


def test_hooks_see_everything_and_change_nothing(tmp_path, plain):
    trainer, watch = make_trainer(tmp_path / "out", eval_strategy="epoch"), Watch()
    monitor = hookline.GradientMonitor(log_frequency=2)
    session = hookline.attach(trainer, hooks=[watch, monitor], runs=tmp_path / "runs")
    trainer.train()
    first = [
        *("train", "epoch 0", "batch 0", "end 0", "batch 1", "end 1", "step 1, 32 tokens"),
        *("batch 2", "end 2", "batch 3", "end 3", "step 2, 64 tokens"),
    ]
    assert watch.events[: len(first)] == first
    last = ["validation", "validated 0", "validation ends", "epoch 1 ends", "completed"]
    assert watch.events[-5:] == last
    assert watch.events.count("epoch 0 ends") == 1
    assert same(weights_of(trainer), weights_of(plain))
    own = [entry for entry in plain.state.log_history if "loss" in entry]
    assert watch.losses == [pytest.approx(entry["loss"], rel=1e-6) for entry in own]
    assert watch.norms == [pytest.approx(entry["grad_norm"], rel=1e-5) for entry in own]
    assert watch.gradients == pytest.approx(watch.norms, rel=1e-5)  # before clipping
    assert max(watch.norms) > 1.0
    mine = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in mine] == [entry["loss"] for entry in own]
    assert [value for _, value in records(session, "train/loss")] == watch.losses
    assert records(session, "val/loss") == records(session, "eval_loss") != []
    assert [step for step, _ in records(session, "gradients/total/norm")] == [2, 4, 6, 8]
    assert not {"train", "training_step", "evaluate", "prediction_step"} & vars(trainer).keys()


class Logged(TrainerCallback):
    """A logger of Hugging Face: what it is given, with the step."""

    def __init__(self) -> None:
        self.values: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.values.append((state.global_step, dict(logs or {})))


def test_what_a_hook_logs_reaches_the_loggers_at_the_trainers_step(tmp_path):
    class Log(hookline.Hook):
        def on_step_end(self, trainer, step):
            trainer.log("mine/step", step * 10)

    logged = Logged()
    trainer = make_trainer(tmp_path / "out", callbacks=[logged])
    session = hookline.attach(trainer, hooks=[Log()], runs=tmp_path / "runs")
    trainer.train()
    found = [(step, values["mine/step"]) for step, values in logged.values if "mine/step" in values]
    assert found == [(step, step * 10.0) for step in range(1, 9)]
    assert records(session, "mine/step") == found
    assert len(records(session, "learning_rate")) == 8  # the trainer's own, under its own name
    assert not any("mine/step" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize(
    "how", [{"logging_steps": 3}, pytest.param({"logging_strategy": "no"}, marks=pytest.mark.soak)]
)
def test_what_hooks_log_waits_for_the_trainers_logging_steps(tmp_path, how):
    class Log(hookline.Hook):
        def on_step_end(self, trainer, step):
            trainer.log("mine/step", step)

    plain, logged = Logged(), Logged()
    make_trainer(tmp_path / "plain", callbacks=[plain], **how).train()
    trainer = make_trainer(tmp_path / "out", callbacks=[logged], **how)
    session = hookline.attach(trainer, hooks=[Log()], runs=tmp_path / "runs")
    trainer.train()
    assert [step for step, _ in logged.values] == [step for step, _ in plain.values]
    assert [values["mine/step"] for _, values in logged.values] == (
        [3, 6, 8] if "logging_steps" in how else [8]  # the last one is that of `train` itself
    )
    assert records(session, "mine/step") == [(step, step) for step in range(1, 9)]
    assert records(session, "train_loss")  # the trainer's own values are recorded, once
    assert len(records(session, "loss")) == (2 if "logging_steps" in how else 0)


def test_a_callback_is_the_same_as_attach(tmp_path, plain):
    watch = Watch()
    callback = HooklineCallback([watch], runs=None)
    trainer = make_trainer(tmp_path / "out", eval_strategy="epoch", callbacks=[callback])
    trainer.train()
    assert watch.events[:3] == ["train", "epoch 0", "batch 0"]
    assert watch.events[-1] == callback.session.status == "completed"
    assert same(weights_of(trainer), weights_of(plain))


def test_a_callback_that_is_added_later_is_refused(tmp_path):
    trainer = make_trainer(tmp_path / "out")
    trainer.add_callback(HooklineCallback([Watch()], runs=None))
    with pytest.raises(LoopError, match=r"callbacks=.*hookline\.attach"):
        trainer.train()


def test_a_resumed_training_is_exact_and_continues_the_run(tmp_path):
    def start(folder, *more):
        trainer = make_trainer(tmp_path / folder, save_strategy="steps", save_steps=2)
        watch = Watch()
        runs = tmp_path / f"runs_{folder}"
        return trainer, watch, hookline.attach(trainer, hooks=[watch, *more], runs=runs)

    class Fail(hookline.Hook):
        critical = True

        def on_step_end(self, step):
            if step == 3:
                raise RuntimeError("broken")

    whole, whole_watch, whole_session = start("whole")
    whole.train()
    failed, watch, first = start("out", Fail())
    with pytest.raises(hookline.HookFailedError, match="broken"):
        failed.train()
    assert watch.events[-2:] == ["HookFailedError", "error"]
    assert "train" not in vars(failed)
    last = hookline.get_last_checkpoint(tmp_path / "out")
    assert last == tmp_path / "out" / "checkpoint-2"
    resumed, watch, session = start("out")
    resumed.train(resume_from_checkpoint=str(last))
    assert watch.events[:4] == ["train", "loaded checkpoint-2 of step 2", "epoch 0", "batch 4"]
    assert watch.losses == whole_watch.losses  # the hook's state was restored
    assert session.run.path == first.run.path
    assert records(session, "train/loss") == records(whole_session, "train/loss")
    assert same(weights_of(resumed), weights_of(whole))


@pytest.mark.parametrize("step", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_a_training_that_continues_after_an_epochs_last_step_ends_this_epoch(tmp_path, step):
    class Epochs(hookline.Hook):
        def __init__(self):
            self.seen = []

        def on_epoch_start(self, epoch):
            self.seen.append(f"epoch {epoch}")

        def on_epoch_end(self, epoch, metrics):
            self.seen.append((epoch, metrics["train/loss"]))

    def train(**options):
        trainer = make_trainer(tmp_path / "out", save_strategy="steps", save_steps=4)
        hook = Epochs()
        session = hookline.attach(trainer, hooks=[hook], runs=tmp_path / "runs")
        trainer.train(**options)
        return hook.seen, records(session, "train/loss_epoch")

    whole, means = train()
    assert [each[0] for each in whole[1::2]] == [0, 1]
    resumed, continued = train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{step}"))
    assert resumed == (whole if step == 4 else whole[2:])
    assert continued == means


def test_only_complete_checkpoints_are_found(tmp_path, caplog):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2)
    hookline.attach(trainer, hooks=[Watch()], runs=None)
    trainer.train()
    newest = tmp_path / "checkpoint-8"
    assert hookline.get_last_checkpoint(tmp_path) == newest
    weights = next(newest.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert hookline.get_last_checkpoint(tmp_path, verify=False) == newest
    assert hookline.get_last_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    assert "model.safetensors has changed since it was written" in caplog.text
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    (tmp_path / "checkpoint-4" / "hookline_complete.json").unlink()
    (tmp_path / "checkpoint-9").mkdir()  # a save that was killed
    assert hookline.get_last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert "resume from it by name" not in caplog.text
    for name in ("checkpoint-2", "checkpoint-6", "checkpoint-8"):
        (tmp_path / name / "hookline_complete.json").unlink()
    assert hookline.get_last_checkpoint(tmp_path) is None
    assert "the newest one, checkpoint-9, and resume from it by name" in " ".join(
        caplog.text.split()
    )


class FindsComplete(TrainerCallback):
    """Notes the last complete checkpoint when the trainer has written another one."""

    def __init__(self) -> None:
        self.found: list[str | None] = []

    def on_save(self, args, state, control, **kwargs):
        last = hookline.get_last_checkpoint(args.output_dir)
        self.found.append(None if last is None else last.name)
        if state.global_step == 8:
            raise ValueError("broken")


def test_a_complete_checkpoint_is_there_until_the_next_one_is_complete(tmp_path):
    finder = FindsComplete()
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    trainer = make_trainer(tmp_path / "out", callbacks=[finder], **options)
    seen = []

    class Look(hookline.Hook):
        def on_checkpoint_save(self):
            seen.append([path.name for path in (tmp_path / "out").glob("checkpoint-*")])

    hookline.attach(trainer, hooks=[Look()])
    with pytest.raises(ValueError, match="broken"):
        trainer.train()
    assert finder.found == [None, "checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert seen == [["checkpoint-2"], ["checkpoint-4"], ["checkpoint-6"]]
    assert trainer.args.save_total_limit == 1
    saved = torch.load(tmp_path / "out/checkpoint-6/training_args.bin", weights_only=False)
    assert saved.save_total_limit == 1


class CannotBeSaved(hookline.Hook):
    """Has a state that cannot be saved, from the second checkpoint on."""

    def __init__(self) -> None:
        self.saved = 0

    def state_dict(self):
        self.saved += 1
        return {"state": object() if self.saved > 1 else None}


def test_a_checkpoint_is_complete_when_all_sessions_are_saved(tmp_path, caplog):
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 4}
    trainer = make_trainer(tmp_path / "out", **options)
    watch = Watch()
    hookline.attach(trainer, hooks=[watch])
    hookline.attach(trainer, hooks=[CannotBeSaved()])
    trainer.train()
    assert hookline.get_last_checkpoint(tmp_path / "out") == tmp_path / "out" / "checkpoint-2"
    assert "The state of the hooks was not saved with" in caplog.text
    assert [event for event in watch.events if "checkpoint" in event] == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    assert trainer.args.save_total_limit == 1


def test_what_was_set_on_the_trainer_is_there_after_training(tmp_path):
    trainer = make_trainer(tmp_path / "out", max_steps=1)
    original = trainer.training_step
    calls = []

    def own_step(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    trainer.training_step = own_step
    sessions = [hookline.attach(trainer, hooks=[Watch()], runs=None) for _ in range(2)]
    trainer.train()
    assert [session.status for session in sessions] == ["completed"] * 2
    assert len(calls) == trainer.args.gradient_accumulation_steps
    assert trainer.training_step is own_step
    assert "train" not in vars(trainer)


def test_a_checkpoint_that_is_written_twice_is_complete(tmp_path):
    class SaveAgain(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = True

        def on_epoch_end(self, args, state, control, **kwargs):
            control.should_save = True

    trainer = make_trainer(tmp_path, callbacks=[SaveAgain()])
    watch = Watch()
    hookline.attach(trainer, hooks=[watch], runs=None)
    trainer.train()
    assert watch.events.count("checkpoint-4") == 2
    assert hookline.get_last_checkpoint(tmp_path) == tmp_path / "checkpoint-8"


def test_a_signal_saves_and_ends_training(tmp_path):
    class Preempt(hookline.Hook):
        def on_step_end(self, step):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer, watch = make_trainer(tmp_path / "out", eval_strategy="epoch"), Watch()
    session = hookline.attach(trainer, hooks=[watch, Preempt()], runs=tmp_path / "runs")
    trainer.train()
    assert trainer.state.global_step == 3
    assert session.status == session.run.manifest["status"] == "preempted"
    assert watch.events[-1] == "preempted"
    assert "validation" not in watch.events  # the process is about to be killed
    assert hookline.get_last_checkpoint(tmp_path / "out") == tmp_path / "out" / "checkpoint-3"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_after_a_signal_the_evaluation_of_the_step_is_left_out(tmp_path):
    class Preempt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    evaluating = {"eval_strategy": "steps", "eval_steps": 1}
    trainer, watch = make_trainer(tmp_path / "out", callbacks=[Preempt()], **evaluating), Watch()
    hookline.attach(trainer, hooks=[watch], runs=None)
    trainer.train()
    assert watch.events.count("validation") == 1
    assert "checkpoint-2" in watch.events
    assert watch.events[-1] == "preempted"


class ReplacesOptimizer(TrainerCallback):
    """Gives the trainer another optimizer before its second step."""

    trainer: Trainer

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            optimizer = torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)
            self.trainer.optimizer = self.trainer.accelerator.prepare(optimizer)


def test_an_optimizer_that_is_replaced_is_reported(tmp_path, caplog):
    replaces = ReplacesOptimizer()
    for hooks in ([Watch()], [hookline.updates.Identity()]):
        trainer = make_trainer(tmp_path / "out", callbacks=[replaces], max_steps=3)
        replaces.trainer = trainer
        session = hookline.attach(trainer, hooks=hooks, runs=None)
        if isinstance(hooks[0], Watch):
            trainer.train()
            assert caplog.text.count("steps with another optimizer (SGD)") == 1
            assert session.step == 1
        else:
            with pytest.raises(hookline.LoopError, match=r"another optimizer.*be left out"):
                trainer.train()


def test_early_stopping_stops_the_trainer(tmp_path):
    stopping = hookline.EarlyStopping(monitor="val/loss", patience=1, min_delta=100.0)
    trainer = make_trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    session = hookline.attach(trainer, hooks=[stopping], runs=None)
    trainer.train()
    assert trainer.state.global_step == session.step == 2
    assert session.status == "stopped"


def test_a_stop_within_a_step_ends_after_it(tmp_path):
    class Stop(hookline.Hook):
        def on_train_batch_end(self, trainer, batch_idx):
            if batch_idx == 2:
                trainer.stop("enough")

    trainer = make_trainer(tmp_path)
    hookline.attach(trainer, hooks=[Stop()])
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_nan_loss_is_seen_although_the_log_hides_it(tmp_path):
    class Broken(GPT2LMHeadModel):
        calls = 0

        def forward(self, input_ids, labels=None, **kwargs):
            outputs = super().forward(input_ids, labels=labels, **kwargs)
            Broken.calls += 1
            if Broken.calls == 3:
                outputs.loss = outputs.loss * float("nan")
            return outputs

    torch.manual_seed(0)
    watch = Watch()
    watch.on_step_end = lambda step, loss: watch.losses.append(loss)  # type: ignore[method-assign]
    trainer = make_trainer(tmp_path, Broken(make_model().config), bf16=False)
    hookline.attach(trainer, hooks=[watch])
    trainer.train()
    assert watch.losses[0] == watch.losses[0]
    assert watch.losses[1] != watch.losses[1]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[1] == logged[1]


def test_a_failing_hook_is_isolated_and_a_toggle_works(tmp_path, plain, caplog):
    class Fails(hookline.Hook):
        def on_step_end(self):
            raise ValueError("not today")

    class Toggle(hookline.Hook):
        def on_step_end(self, trainer, step):
            if step == 2:
                trainer.hooks.disable_hook("watch")

    watch = Watch()
    trainer = make_trainer(tmp_path / "out", eval_strategy="epoch")
    session = hookline.attach(trainer, hooks=[watch, Fails(), Toggle()], runs=tmp_path / "runs")
    trainer.train()
    assert len(watch.losses) == 2
    failures = {info.name: info.failures for info in session.hooks.describe()}
    assert failures["fails"] == 3
    assert "not today" in caplog.text
    assert same(weights_of(trainer), weights_of(plain))


def test_updates_and_probes_work(tmp_path, plain):
    capture = hookline.probes.Capture("transformer.h.0.mlp")
    trainer = make_trainer(tmp_path, eval_strategy="epoch")
    hookline.attach(trainer, hooks=[capture, hookline.ClipNorm(max_norm=0.01)])
    trainer.train()
    assert [state.step for state in capture.states("transformer.h.0.mlp")][:4] == [0, 0, 1, 1]
    assert capture.counts.captured == 16  # not those of validations
    assert not same(weights_of(trainer), weights_of(plain))


def test_what_is_missing_is_refused_by_name(tmp_path, caplog):
    class Before(hookline.Hook):
        def on_before_backward(self, loss):
            raise AssertionError

    with pytest.raises(NotSuppliedError, match=r"Before.on_before_backward") as error:
        hookline.attach(make_trainer(tmp_path), hooks=[Before()])
    assert "allow_missing=True" in str(error.value)
    trainer = make_trainer(tmp_path, max_steps=1)
    hookline.attach(trainer, hooks=[Before()], allow_missing=True)
    trainer.train()
    assert "on_before_backward" in caplog.text


def test_options_without_effect_are_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ArgumentError, match="'optimizer'"):
        hookline.attach(trainer, torch.optim.SGD(trainer.model.parameters()), hooks=[])
    with pytest.raises(ArgumentError, match="'scaler'"):
        hookline.attach(trainer, hooks=[], scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ArgumentError, match="'on_stop'"):
        hookline.attach(trainer, hooks=[], on_stop="raise")
    model = nn.Linear(1, 1)
    with pytest.raises(ArgumentError, match="'allow_missing'"):
        hookline.attach(model, torch.optim.SGD(model.parameters()), allow_missing=True)
    with pytest.raises(LoopError, match="auto_find_batch_size"):
        hookline.attach(make_trainer(tmp_path, auto_find_batch_size=True), hooks=[])


def test_a_second_training_needs_another_session(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    hookline.attach(trainer, hooks=[Watch()])
    trainer.train()
    with pytest.raises(LoopError, match="Attach again"):
        trainer.train()


class CopiesItsTrainer(TrainerCallback):
    """Copies the trainer within `train`."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.copied: Any = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and self.copied is None:
            self.copied = copy.deepcopy(self.trainer)


@pytest.mark.soak
def test_a_trainer_with_hooks_is_copied_without_them_at_any_time(tmp_path, plain, caplog):
    watch, copies = Watch(), CopiesItsTrainer()
    trainer = make_trainer(tmp_path, eval_strategy="epoch", callbacks=[copies])
    hookline.attach(trainer, hooks=[watch], runs=None)
    before = copy.deepcopy(trainer)
    assert caplog.text.count("has no hooks") == 1
    copies.trainer = trainer
    trainer.train()
    copies.trainer = None
    during = copies.copied
    copies.copied = None
    assert caplog.text.count("has no hooks") == 2
    after = copy.deepcopy(trainer)
    assert caplog.text.count("has no hooks") == 2  # there is nothing to miss
    seen = list(watch.events)
    for copied in (before, during, after):
        assert copied.model is not trainer.model
        assert not any(isinstance(c, HooklineCallback) for c in copied.callback_handler.callbacks)
        assert not copied.model._forward_hooks
        assert copied.train.__self__ is copied
    before.train()
    assert before.state.global_step == 8
    assert same(weights_of(trainer), weights_of(plain))
    assert watch.events == seen


def test_a_callback_with_hooks_is_pickled_without_them(caplog):
    callback = HooklineCallback([Watch()], runs=None)
    assert type(pickle.loads(pickle.dumps(callback))).__mro__[1] is TrainerCallback
    assert "has no hooks" in caplog.text


def test_every_event_is_given_or_named_as_missing():
    assert [event for event, _ in HOST.rows()] == list(EVENTS)
    assert all(place for event, place in HOST.rows() if event not in HOST.missing)
    assert set(HOST.places) | set(HOST.missing) <= set(EVENTS)


# -- TRL ------------------------------------------------------------------------------------------


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[EOS]", "[UNK]", *(f"w{i}" for i in range(VOCABULARY - 3))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **tokens)


def make_trl_trainer(kind: str, folder: Path) -> Trainer:
    import trl
    from datasets import Dataset

    options: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if kind == "sft":
        data = Dataset.from_dict({"text": [f"w{i} w{i + 1} w{i + 2}" for i in range(8)]})
        args = trl.SFTConfig(str(folder), gradient_accumulation_steps=2, max_length=16, **options)
        trainer = trl.SFTTrainer
        more = {}
    elif kind == "dpo":
        rows = {"prompt": "w{}", "chosen": " w{} w1", "rejected": " w{} w2"}
        data = Dataset.from_dict(
            {name: [text.format(i) for i in range(8)] for name, text in rows.items()}
        )
        args = trl.DPOConfig(
            str(folder), gradient_accumulation_steps=2, learning_rate=1e-2, max_length=16, **options
        )
        trainer, more = trl.DPOTrainer, {"ref_model": make_model()}
    else:
        data = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(8)]})
        args = trl.GRPOConfig(
            str(folder), num_generations=4, max_completion_length=4, learning_rate=1e-2, **options
        )
        trainer = trl.GRPOTrainer
        more = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
    tokenizer = make_tokenizer()
    return trainer(make_model(), args=args, train_dataset=data, processing_class=tokenizer, **more)


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trl_trainers_with_hooks_train_the_same_model(kind, tmp_path):
    class Steps(hookline.Hook):
        def __init__(self):
            self.losses: list[float] = []
            self.forwards = 0

        def on_after_forward(self, outputs):
            self.forwards += 1

        def on_step_end(self, loss):
            self.losses.append(loss)

    own = make_trl_trainer(kind, tmp_path / "plain")
    own.train()
    trainer, steps = make_trl_trainer(kind, tmp_path / "hooks"), Steps()
    capture = hookline.probes.Capture("transformer.h.0.mlp")
    hookline.attach(trainer, hooks=[steps, capture], runs=None)
    trainer.train()
    assert same(weights_of(own), weights_of(trainer))
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps.losses == pytest.approx(logged, rel=1e-5, abs=1e-7)
    batches = 2 if kind == "grpo" else 4
    assert steps.forwards == capture.counts.captured == batches  # without those of `generate`


logging.getLogger("transformers").setLevel(logging.ERROR)
