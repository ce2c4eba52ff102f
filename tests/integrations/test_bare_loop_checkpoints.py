"""Checkpoints of a loop that the user has written: saved between its steps, and resumed exactly."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import batches, make, recorder, run_on_two_ranks, same, train, weights
from torch import nn
from torch.nn import functional as F
from warm_processes import start_warm

import hookline
from hookline.checkpoint import complete_checkpoints, load_checkpoint
from hookline.errors import CheckpointError, LoopError


class Norm(nn.Module):
    """Has buffers that the forward changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.dropout(self.norm(self.first(x)), 0.3, self.training))


class Every(hookline.Hook):
    """Asks for a checkpoint every three steps."""

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step % 3 == 0:
            trainer.save_checkpoint()


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "model": lambda model, x: model(x),
    "forward": lambda model, x: model.forward(x),
    "parts": lambda model, x: model.second(model.norm(model.first(x))),
}


class Loop:
    """A loop with a scheduler, a scaler, clipping and accumulation, whose data are random."""

    def __init__(self, runs: Path, call: str = "model", **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.call = Norm(), CALLS[call]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        options.setdefault("hooks", [Every(), hookline.EMA(every_n_steps=2)])
        self.session = hookline.attach(
            self.model,
            self.optimizer,
            schedulers=self.scheduler,
            scaler=self.scaler,
            runs=runs,
            **options,
        )
        self.session.add_hook(hookline.updates.Noise(0.01, seed=1))

    def run(self, steps: int, fail_after: int | None = None) -> hookline.Session:
        session = self.session
        self.start = start = session.load_checkpoint()
        with session:
            for step in range(start.step if start else 0, steps):
                for _ in range(2):
                    x = torch.randn(8, 4) * random.random()
                    loss = F.mse_loss(self.call(self.model, x), x.sum(1, keepdim=True))
                    self.scaler.scale(loss / 2).backward()
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.optimizer.zero_grad()
                session.log("late", step)
                if step + 1 == fail_after:
                    raise KeyboardInterrupt
        return session

    def states(self) -> Any:
        objects = (self.model, self.optimizer, self.scheduler, self.scaler, self.session.hooks)
        return [thing.state_dict() for thing in objects]


def records(runs: Path) -> list[Any]:
    (run,) = runs.iterdir()
    return [
        (row["step"], row["epoch"], row["name"], row["value"])
        for row in hookline.open_run(run).metrics()
    ]


def saved_weights(checkpoint: Path, model: nn.Module) -> list[torch.Tensor]:
    saved = load_checkpoint(checkpoint).model
    return [saved[name] for name, _ in model.named_parameters()]


def names(folder: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(folder)]


@pytest.mark.parametrize(
    "call", ["model", *(pytest.param(c, marks=pytest.mark.soak) for c in CALLS if c != "model")]
)
def test_a_resumed_loop_ends_with_the_same_bits(call: str, tmp_path: Path) -> None:
    random.seed(3)
    whole = Loop(tmp_path / "whole", call)
    whole.run(11)
    for fail_after in (2, 4, 8):  # the first has no checkpoint, and starts again
        random.seed(3)  # what is not restored
        with pytest.raises(KeyboardInterrupt):
            Loop(tmp_path / "cut", call).run(11, fail_after)
        if fail_after == 2:
            (folder,) = (tmp_path / "cut").iterdir()
            assert not (folder / "checkpoints").exists()
            folder.rename(tmp_path / "first")
    cut = Loop(tmp_path / "cut", call)
    cut.run(11)
    assert cut.start is not None
    assert cut.start.step == 6
    assert equal(cut.states(), whole.states())
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def test_a_loop_saves_by_itself_and_gets_its_own_values_back(tmp_path: Path) -> None:
    model, optimizer = make()
    hook = recorder(on_checkpoint_save=("path", "step"))
    with hookline.attach(model, optimizer, hooks=[hook], runs=tmp_path) as session:
        with session.epoch():
            train(model, optimizer, batches(3))
        saved = session.save_checkpoint(extra={"seen": [1, 2], "best": 0.5}, wait=True)
        before = weights(model)
        train(model, optimizer, batches(2))
    assert saved is not None
    assert saved == session.run.checkpoints / "step_000003"  # type: ignore[union-attr]
    assert hook.told == [("on_checkpoint_save", {"path": str(saved), "step": 3})]

    other, other_optimizer = make(seed=5)
    hook = recorder(on_checkpoint_load=("path", "step"))
    again = hookline.attach(other, other_optimizer, hooks=[hook], runs=tmp_path)
    start = again.load_checkpoint(saved)
    assert start is not None
    assert (start.path, start.step, start.epoch) == (saved, 3, 1)
    assert start.extra == {"seen": [1, 2], "best": 0.5}
    assert same(weights(other), before)
    with again, again.epoch() as epoch:
        assert epoch == 1
        train(other, other_optimizer, batches(2))
    assert again.run is not None
    assert again.run.id == session.run.id  # type: ignore[union-attr]
    assert hook.told == [("on_checkpoint_load", {"path": str(saved), "step": 3})]
    losses = [row for row in records(tmp_path) if row[2] == "train/loss"]
    assert [row[0] for row in losses] == [1, 2, 3, 4, 5]
    assert [row[1] for row in losses] == [0, 0, 0, 1, 1]


def test_what_happens_while_a_checkpoint_is_written_is_not_in_it(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer) as session:
        train(model, optimizer, batches(2))
        before = weights(model)
        assert session.save_checkpoint(tmp_path / "mine") is None
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
    assert same(saved_weights(tmp_path / "mine", model), before)


def test_an_epoch_that_was_interrupted_continues_with_its_means(tmp_path: Path) -> None:
    def loop(session: hookline.Session, model: Any, optimizer: Any, first: int, cut: bool) -> None:
        with session:
            for _ in range(2):
                with session.epoch():
                    for x, y in batches(4)[first:]:
                        train(model, optimizer, [(x, y)])
                        if cut and session.step == 6:
                            session.save_checkpoint(wait=True)
                            raise KeyboardInterrupt
                first = 0

    model, optimizer = make(momentum=0.5)
    model.drop.p = 0.0
    loop(hookline.attach(model, optimizer, runs=tmp_path / "a"), model, optimizer, 0, False)
    other, optimizer = make(momentum=0.5)
    other.drop.p = 0.0
    with pytest.raises(KeyboardInterrupt):
        loop(hookline.attach(other, optimizer, runs=tmp_path / "b"), other, optimizer, 0, True)
    other, optimizer = make(momentum=0.5)
    other.drop.p = 0.0
    session = hookline.attach(other, optimizer, runs=tmp_path / "b")
    start = session.load_checkpoint()
    assert start is not None
    assert (start.step, start.epoch) == (6, 1)
    with session, session.epoch() as epoch:
        assert epoch == 1
        train(other, optimizer, batches(4)[start.step % 4 :])
    assert same(weights(other), weights(model))
    assert records(tmp_path / "b") == records(tmp_path / "a")


def test_auto_continues_the_newest_unfinished_run_of_the_same_training(tmp_path: Path) -> None:
    def attach(**options: Any) -> tuple[Any, Any, hookline.Session]:
        model, optimizer = make(**options.pop("make", {}))
        return model, optimizer, hookline.attach(model, optimizer, runs=tmp_path, **options)

    def interrupt(**options: Any) -> hookline.Session:
        model, optimizer, session = attach(**options)
        with pytest.raises(KeyboardInterrupt), session:
            train(model, optimizer, batches(1))
            session.save_checkpoint(wait=True)
            raise KeyboardInterrupt
        return session

    assert attach()[2].load_checkpoint() is None
    first = interrupt()
    named = interrupt(name="mine")
    for options in (
        {"name": "other"},
        {"config": {"width": 3}},
        {"hparams": {"seed": 1}},
        {"make": {"momentum": 0.9}},
        {"hooks": [Every()]},
    ):
        assert attach(**options)[2].load_checkpoint() is None
    for options, expected in (({}, first), ({"name": "mine"}, named)):
        model, optimizer, session = attach(**options)
        assert session.load_checkpoint() is not None
        with session:
            train(model, optimizer, batches(1))
        assert session.run is not None
        assert session.run.id == expected.run.id  # type: ignore[union-attr]
        assert attach(**options)[2].load_checkpoint() is None  # it is complete


def test_a_run_whose_learning_rate_the_loop_sets_is_found_again_and_again(tmp_path: Path) -> None:
    for expected in (None, 1, 2):
        model, optimizer = make()
        session = hookline.attach(model, optimizer, runs=tmp_path)
        start = session.load_checkpoint()
        assert (None if start is None else start.step) == expected
        with pytest.raises(KeyboardInterrupt), session:
            optimizer.param_groups[0]["lr"] *= 0.5
            train(model, optimizer, batches(1))
            session.save_checkpoint(wait=True)
            raise KeyboardInterrupt
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_a_run_is_found_again_if_the_loop_changes_lr_and_config_before_its_first_step(
    tmp_path: Path,
) -> None:
    for expected in (None, 1, 2):
        model, optimizer = make()
        config = {"width": 4, "start": 0, "api_key": "s3cr3t-value"}
        session = hookline.attach(model, optimizer, runs=tmp_path, config=config)
        start = session.load_checkpoint()
        assert (None if start is None else start.step) == expected
        optimizer.param_groups[0]["lr"] = 0.1 / (session.step + 2)  # as loops without schedulers do
        config["start"] = session.step
        train(model, optimizer, batches(1))  # the session starts in the first step
        session.save_checkpoint(wait=True)
        interrupt_session(session)
    assert session.run is not None
    described = session.run.manifest
    assert described["training"]["optimizers"][0]["groups"][0]["lr"] == 0.1
    assert described["config"]["start"] == 0


def interrupt_session(session: hookline.Session) -> None:
    with pytest.raises(KeyboardInterrupt), session:
        raise KeyboardInterrupt


def test_a_run_that_was_described_when_it_started_is_still_found(tmp_path: Path) -> None:
    """So did earlier versions."""
    model, optimizer = make()
    session = hookline.attach(model, optimizer, runs=tmp_path)
    train(model, optimizer, batches(1))
    session.save_checkpoint(wait=True)
    interrupt_session(session)
    manifest_file = session.run.path / "manifest.json"  # type: ignore[union-attr]
    manifest = json.loads(manifest_file.read_text())
    manifest["training"]["optimizers"][0]["groups"][0]["lr"] = 0.05
    manifest_file.write_text(json.dumps(manifest))

    model, optimizer = make()
    session = hookline.attach(model, optimizer, runs=tmp_path)
    optimizer.param_groups[0]["lr"] = 0.05
    assert session.load_checkpoint() is not None
    session.detach()


def test_without_a_run_to_continue_the_nearest_one_and_what_differs_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(**options: Any) -> str:
        model, optimizer = make(momentum=options.pop("momentum", 0.0))
        session = hookline.attach(model, optimizer, runs=tmp_path, **options)
        with suppress(KeyboardInterrupt), session:
            train(model, optimizer, batches(1))
            session.save_checkpoint(wait=True)
            run = session.run.id  # type: ignore[union-attr]
            if not options.get("name"):
                raise KeyboardInterrupt
        return run

    far = interrupt(momentum=0.9, config={"width": 3}, hooks=[Every()])
    near = interrupt(momentum=0.5, config={"width": 4, "password": "hunter22"}, hooks=[Every()])
    interrupt(name="completed", config={"width": 4})
    caplog.set_level("INFO", "hookline")
    model, optimizer = make()
    hookline.attach(
        model, optimizer, runs=tmp_path, config={"width": 4, "password": "another1"}
    ).load_checkpoint()
    said = caplog.text
    assert "there is no unfinished run of this configuration. Starting a new run." in said
    assert f"The nearest unfinished run is {near} (interrupted), which differs:" in said
    assert "the hook 'every' is only there" in said
    assert "optimizers.0.groups.0.momentum is 0 here, 0.5 there" in said
    assert str(tmp_path / near) in said
    assert far not in said
    assert "hunter22" not in said
    assert "another1" not in said


def test_auto_is_loaded_before_training_starts(tmp_path: Path) -> None:
    model, optimizer = make()
    with (
        hookline.attach(model, optimizer, runs=tmp_path) as session,
        pytest.raises(LoopError, match="Load before that"),
    ):
        session.load_checkpoint()


def test_a_checkpoint_of_the_same_run_can_be_loaded_while_training(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path) as session:
        train(model, optimizer, batches(2))
        saved = session.save_checkpoint(wait=True)
        before = weights(model)
        first = train(model, optimizer, batches(2))
        assert saved is not None
        start = session.load_checkpoint(saved)
        assert start is not None
        assert (session.step, start.step) == (2, 2)
        assert same(weights(model), before)
        assert train(model, optimizer, batches(2)) == first
    steps = [row[0] for row in records(tmp_path) if row[2] == "train/loss"]
    assert steps == [1, 2, 3, 4]


def test_all_that_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer) as session:
        train(model, optimizer, batches(1))
        session.save_checkpoint(tmp_path / "saved")
    other = nn.Sequential(nn.Linear(8, 3))
    adam = torch.optim.Adam(other.parameters())
    before = weights(other)
    session = hookline.attach(other, adam)
    with pytest.raises(CheckpointError, match=r"(?s)lacks '0.weight'.*SGD in the checkpoint"):
        session.load_checkpoint(tmp_path / "saved")
    assert same(weights(other), before)


def test_a_checkpoint_that_is_asked_for_within_a_step_waits_for_its_end(tmp_path: Path) -> None:
    class AfterBatches(hookline.Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx in (0, 3):  # in the middle of the first step, and at the end of the second
                trainer.save_checkpoint(tmp_path / f"batch_{batch_idx}")

        def on_after_backward(self) -> None: ...

    model, optimizer = make()
    ends = []
    with hookline.attach(model, optimizer, hooks=[AfterBatches()]) as session:
        for i, (x, y) in enumerate(session.batches(batches(6))):
            F.mse_loss(model(x), y).backward()
            if i == 0:
                assert session.save_checkpoint(tmp_path / "by_loop") is None
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.first.bias.clamp_(-0.1, 0.1)  # belongs to the step
                ends.append(weights(model))
    for name, step in (("batch_0", 1), ("by_loop", 1), ("batch_3", 2)):
        assert load_checkpoint(tmp_path / name).info["step"] == step
        assert same(saved_weights(tmp_path / name, model), ends[step - 1])


def test_a_checkpoint_that_the_last_step_asks_for_is_saved_at_the_end(tmp_path: Path) -> None:
    class AtEnd(hookline.Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.save_checkpoint(tmp_path / "last_step")

        def on_train_end(self, trainer: Any) -> None:
            self.saved = trainer.save_checkpoint(tmp_path / "end")

    hook = AtEnd()
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]):
        train(model, optimizer, batches(2))
    assert names(tmp_path) == ["last_step", "end"]
    assert hook.saved == tmp_path / "end"


def test_a_checkpoint_that_is_asked_for_after_an_exception_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Emergency(hookline.Hook):
        def on_exception(self, trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "emergency")

    model, optimizer = make()
    with pytest.raises(KeyError), hookline.attach(model, optimizer, hooks=[Emergency()]):
        train(model, optimizer, batches(1))
        raise KeyError("within a step, perhaps")
    assert names(tmp_path) == []
    assert "emergency was requested, but not saved" in caplog.text


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path: Path) -> None:
    model, optimizer = make()
    compiled = torch.compile(model, backend="eager")
    torch._dynamo.utils.counters.clear()
    with hookline.attach(compiled, optimizer, hooks=[Every()], runs=tmp_path) as session:
        train(compiled, optimizer, batches(8))
    assert session.run is not None
    saved = complete_checkpoints(session.run.checkpoints)
    assert [path.name for path in saved] == ["step_000003", "step_000006"]
    assert load_checkpoint(saved[0]).model.keys() == model.state_dict().keys()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch.compiler.reset()


def test_a_model_compiled_in_place_is_saved_between_its_steps(tmp_path: Path) -> None:
    model, optimizer = make()
    model.compile(backend="eager")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with hookline.attach(
        model, optimizer, hooks=[Every()], schedulers=scheduler, runs=tmp_path
    ) as session:
        for batch in batches(4):
            train(model, optimizer, [batch])
            scheduler.step()
    saved = complete_checkpoints(session.run.checkpoints)
    assert [path.name for path in saved] == ["step_000003"]
    assert load_checkpoint(saved[0]).state["schedulers"][0]["last_epoch"] == 3
    torch.compiler.reset()


def test_several_models_and_attributes_of_hooks_are_saved(tmp_path: Path) -> None:
    class Counts(hookline.Hook):
        def on_train_start(self, trainer: Any) -> None:
            trainer.counted = 0
            trainer.register_for_checkpoint("counted")

        def on_step_end(self, trainer: Any) -> None:
            trainer.counted += 1

    def attach() -> tuple[list[nn.Module], list[Any], Any]:
        models: list[nn.Module] = [nn.Linear(8, 4), nn.Linear(4, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        return models, optimizers, hookline.attach(models, optimizers, hooks=[Counts()])

    models, optimizers, session = attach()
    with session:
        for x, _ in batches(2):
            models[1](models[0](x)).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        session.save_checkpoint(tmp_path / "both")
    others, _, again = attach()
    again.load_checkpoint(tmp_path / "both")
    assert all(same(weights(a), weights(b)) for a, b in zip(models, others, strict=True))
    with again:
        assert again.counted == 2


def test_without_a_run_a_path_is_needed(tmp_path: Path) -> None:
    model, optimizer = make()
    with (
        hookline.attach(model, optimizer) as session,
        pytest.raises(LoopError, match=r"attach\(…, runs='runs'\)"),
    ):
        session.save_checkpoint()
    assert hookline.attach(model, optimizer).load_checkpoint() is None


@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_a_checkpoint_that_cannot_be_written_is_loud(
    on_failure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    model, optimizer = make()
    session = hookline.attach(model, optimizer, checkpoints={"on_failure": on_failure})

    def loop() -> None:
        with session:
            train(model, optimizer, batches(1))
            session.save_checkpoint(tmp_path / "file" / "mine")
            train(model, optimizer, batches(2))

    if on_failure == "stop":
        with pytest.raises(CheckpointError, match="could not be written"):
            loop()
    else:
        loop()
        assert session.status == "completed"
    assert "could not be written" in caplog.text


def test_numbers_in_the_manifest_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model, optimizer = make()
    session = hookline.attach(model, optimizer, hooks=[Every()], runs=tmp_path)
    with session, session.epoch(4):
        train(model, optimizer, batches(5))
    run = hookline.open_run(session.run.path)  # type: ignore[union-attr]
    (event,) = run.events("checkpoint")
    assert (event["step"], Path(event["path"]).name) == (3, "step_000003")
    manifest = json.loads((Path(event["path"]) / "manifest.json").read_text())
    info = {name: manifest["info"][name] for name in ("step", "epoch", "run_id")}
    assert info == {"step": 3, "epoch": 4, "run_id": run.id}


def test_auto_needs_a_process_group_where_there_are_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, optimizer = make()
    with pytest.raises(LoopError, match="init_process_group"):
        hookline.attach(model, optimizer, runs=tmp_path).load_checkpoint()


# -- processes ------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, hookline
from torch.nn import functional as F

runs, weights = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
data = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(20)]

class Every(hookline.Hook):
    def on_step_end(self, trainer, step):
        if step % 5 == 0:
            trainer.save_checkpoint()

session = hookline.attach(model, optimizer, hooks=[Every()], schedulers=scheduler, runs=runs)
start = session.load_checkpoint()
first = start.step if start else 0
if start:
    torch.rand(3)  # drawn to find the data again
    start.restore_random_state()
print("from", first, flush=True)
with session:
    for step in range(first, 60):
        model(data[step % 20]).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(step + 1, flush=True)
torch.save(model.state_dict(), weights)
"""


def test_a_killed_loop_ends_with_the_same_weights(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)

    def train_until(name: str, step: int | None) -> int:
        """Run the script, and kill it after a step; return the step that it began from."""
        words = [str(script), str(tmp_path / name), str(tmp_path / f"{name}.pt")]
        log = tmp_path / f"{name}_{step}.txt"
        process = start_warm(words, environment=os.environ, log=log)
        lines = process.lines()
        first = int(next(lines).split()[1])
        for line in lines:
            if step is not None and int(line) >= step:
                process.send_signal(signal.SIGKILL)
                break
        assert process.wait() == (0 if step is None else -signal.SIGKILL), process.errors
        return first

    train_until("whole", None)
    begins = [train_until("cut", step) for step in (17, 38, None)]
    assert 0 == begins[0] < begins[1] <= 15 < begins[2] <= 35
    whole, cut = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "cut"))
    assert equal(dict(whole), dict(cut))
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


DDP_SCRIPT = """
import os, sys
import torch, torch.distributed as dist, hookline
from pathlib import Path
dist.init_process_group("gloo")
rank = dist.get_rank()
runs = Path(__file__).parent / "runs"

class Every(hookline.Hook):
    def on_step_end(self, trainer, step):
        if step % 2 == 0:
            trainer.save_checkpoint()

for part in range(2):
    torch.manual_seed(part)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hookline.attach(model, optimizer, hooks=[Every()], runs=runs)
    start = session.load_checkpoint()
    assert (start is None) == (part == 0), (rank, start)
    try:
        with session:
            for step in range(start.step if start else 0, 5):
                model(torch.full((2, 4), float(rank + step))).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert (session.run is None) == (rank == 1)
            if part == 0:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    dist.barrier()
(run,) = runs.iterdir()
names = sorted(path.name for path in (run / "checkpoints").iterdir())
assert names == ["last", "step_000002", "step_000004"], names
assert start.step == 4
print(f"rank {rank} fine", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo threads sometimes abort the interpreter while it exits
"""


@pytest.mark.slow
def test_under_ddp_the_first_rank_writes_and_all_continue(tmp_path: Path) -> None:
    assert run_on_two_ranks(DDP_SCRIPT, tmp_path).count("fine") == 2
