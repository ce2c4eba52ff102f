"""RuntimeProfile and TorchProfiler: where time goes."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_clock import FakeClock
from loops import batches, make
from torch.nn import functional as F

import hookline
from hookline.hooks.monitoring import runtime_profile
from hookline.hooks.monitoring.runtime_profile import RuntimeProfile
from hookline.hooks.monitoring.torch_profiler import TorchProfiler
from hookline.runs.jsonl_reader import read_records
from hookline.tensors import timing
from hookline.tensors.timing import record_time, timed_device

PHASES = ("data", "forward", "backward", "optimizer")


def trained(folder: Path | None, *hooks: hookline.Hook, data: Any = None, **options: Any) -> Any:
    val = options.pop("val_loaders", None)
    loss_fn = options.pop("loss_fn", F.mse_loss)
    given = {name: options.pop(name) for name in ("step_fn", "tokens_fn") if name in options}
    config = hookline.TrainerConfig(**{"runs": folder, "progress": "off"} | options)
    trainer = hookline.Trainer(config, *make(), loss_fn=loss_fn, hooks=hooks, **given)
    return trainer.fit(batches(6) if data is None else data, val_loaders=val)


def recorded(trainer: Any) -> dict[tuple[int, str], float]:
    assert trainer.hooks.summary().failures == {}
    return {
        (one["step"], one["name"]): one["value"]
        for one in read_records(trainer.run.path / "metrics.jsonl")
        if one["name"].startswith("profile/")
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch, runtime_profile, timing)


class Slow:
    """Batches that each take a while to come."""

    def __init__(self, clock: FakeClock, seconds: float, number: int = 4) -> None:
        self.clock = clock
        self.seconds = seconds
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[Any]:
        for batch in batches(self.number):
            self.clock.wait(self.seconds)
            yield batch


# -- RuntimeProfile -------------------------------------------------------------------------------


def test_every_phase_of_every_loader_is_timed(tmp_path: Path) -> None:
    loaders = {"web": batches(4), "code": batches(4)}
    values = recorded(
        trained(tmp_path, RuntimeProfile(2), data=loaders, loaders={"order": "round_robin"})
    )
    for step in (2, 4, 6, 8):
        for name in loaders:
            for phase in PHASES:
                assert values[step, f"profile/train/dl_{name}/time_{phase}_ms"] > 0


def test_the_time_that_each_phase_takes_is_its_own(tmp_path: Path, clock: FakeClock) -> None:
    class InOptimizer(hookline.Hook):
        def on_gradients_ready(self) -> None:
            clock.wait(0.04)

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            clock.wait(0.03)
            return grad

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        clock.wait(0.02)
        return F.mse_loss(InBackward.apply(outputs), targets)

    data = Slow(clock, 0.05)
    values = recorded(
        trained(tmp_path, RuntimeProfile(4), InOptimizer(), data=data, loss_fn=loss_fn)
    )
    found = {phase: values[4, f"profile/train/dl_train/time_{phase}_ms"] for phase in PHASES}
    expected = {"data": 50, "forward": 0, "backward": 50, "optimizer": 40}
    assert found == pytest.approx(expected)
    samples = len(batches(1)[0][0])
    assert values[4, "profile/train/samples_per_second"] == pytest.approx(samples / 0.14)


class Sleep(hookline.Hook):
    """Takes time at the end of the second step, and may save then."""

    def __init__(self, clock: FakeClock, *, saves: bool) -> None:
        self.clock = clock
        self.saves = saves

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 2:
            self.clock.wait(0.4)
            if self.saves:
                trainer.save_checkpoint()

    def on_checkpoint_save(self) -> None:
        self.clock.wait(0.4)


@pytest.mark.parametrize(("saves", "validates"), [(False, False), (True, False), (False, True)])
def test_hooks_checkpoints_and_validation_are_no_waiting_for_data(
    tmp_path: Path, clock: FakeClock, saves: bool, validates: bool
) -> None:
    validation = {"val_loaders": Slow(clock, 0.2, 2), "validate_every_steps": 2}
    hooks = RuntimeProfile(4), Sleep(clock, saves=saves)
    data = Slow(clock, 0.01)
    trainer = trained(tmp_path, *hooks, data=data, **(validation if validates else {}))
    assert recorded(trainer)[4, "profile/train/dl_train/time_data_ms"] == pytest.approx(10)


def test_memory_is_what_the_process_holds(tmp_path: Path) -> None:
    class Hold(hookline.Hook):
        def on_step_end(self, step: int) -> None:
            if step == 2:
                self.held = torch.ones(100_000_000)  # 400 MB: what other tests have left is less

    gc.collect()
    values = recorded(trained(tmp_path, RuntimeProfile(1), Hold(), data=batches(3)))
    before, after = (values[step, "profile/memory_resident_mb"] for step in (1, 3))
    assert 300 < after - before < 500


def test_an_unchanged_bare_loop_is_profiled(tmp_path: Path, clock: FakeClock) -> None:
    model, optimizer = make()
    session = hookline.attach(model, optimizer, hooks=[RuntimeProfile(2)], runs=tmp_path)
    with session:
        for x, y in batches(4):
            clock.wait(0.02)
            with torch.no_grad():
                model(x)  # an evaluation, which is not a batch
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            clock.wait(0.01)
            loss.backward()
            optimizer.step()
    assert session.hooks.summary().failures == {}
    (path,) = tmp_path.glob("*/metrics.jsonl")
    values = {one["name"]: one["value"] for one in read_records(path) if one["step"] == 4}
    times = {phase: values[f"profile/train/dl_train/time_{phase}_ms"] for phase in PHASES}
    assert times == pytest.approx({"data": 20, "forward": 0, "backward": 10, "optimizer": 0})


def test_a_bare_loop_that_tells_its_batches_is_profiled(tmp_path: Path) -> None:
    model, optimizer = make()
    data = [{"input_ids": x, "y": y} for x, y in batches(4)]
    session = hookline.attach(model, optimizer, hooks=[RuntimeProfile(4)], runs=tmp_path)
    with session:
        for batch in session.batches(data, name="web"):
            optimizer.zero_grad()
            session.backward(F.mse_loss(model(batch["input_ids"]), batch["y"]))
            optimizer.step()
    assert session.hooks.summary().failures == {}
    (path,) = tmp_path.glob("*/metrics.jsonl")
    names = {one["name"] for one in read_records(path) if one["step"] == 4}
    assert {f"profile/train/dl_web/time_{phase}_ms" for phase in PHASES} <= names
    assert "profile/train/tokens_per_second" in names


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")
def test_an_accelerator_is_timed_by_its_own_clock(tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    assert timed_device(device) == device
    assert isinstance(record_time(device), torch.Event)
    values = recorded(trained(tmp_path, RuntimeProfile(2), device=str(device)))
    assert values[6, "profile/train/dl_train/time_forward_ms"] > 0
    assert values[6, "profile/memory_peak_mb"] > 0


# -- TorchProfiler --------------------------------------------------------------------------------


def traces(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


def names_in(trace: Any) -> set[str]:
    return {event["name"] for event in trace["traceEvents"] if "name" in event}


def steps_in(trace: Any) -> int:
    return len({name for name in names_in(trace) if name.startswith("ProfilerStep#")})


def test_a_trace_is_written_into_the_runs_folder(tmp_path: Path) -> None:
    trainer = trained(tmp_path, TorchProfiler(wait=1, warmup=1, active=2))
    assert trainer.hooks.summary().failures == {}
    ((name, trace),) = traces(trainer.run.path / "profile").items()
    assert name == "trace_step_000004.json"
    assert "aten::addmm" in names_in(trace)
    assert steps_in(trace) == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"wait": 0, "warmup": 1, "active": 1}, [2]),
        ({"wait": 2, "warmup": 2, "active": 1}, [5]),
    ],
)
def test_the_schedule_is_kept(tmp_path: Path, options: dict[str, Any], expected: list[int]) -> None:
    trained(None, TorchProfiler(**options, folder=tmp_path))
    assert list(traces(tmp_path)) == [f"trace_step_{step:06d}.json" for step in expected]


def test_training_that_stops_early_leaves_what_was_recorded(tmp_path: Path) -> None:
    class Stop(hookline.Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                trainer.stop("enough")

    trained(None, Stop(), TorchProfiler(0, 1, 50, folder=tmp_path))
    ((name, trace),) = traces(tmp_path).items()
    assert name == "trace_step_000003.json"
    assert "aten::addmm" in names_in(trace)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_exception_ends_profiling_cleanly(tmp_path: Path, at: int) -> None:
    def data() -> Iterator[Any]:
        yield from batches(at)
        raise ValueError("the loader broke")

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return data()

    with pytest.raises(ValueError, match="the loader broke"):
        trained(None, TorchProfiler(1, 1, 5, folder=tmp_path / "first"), data=Loader())
    assert not torch.autograd.profiler._is_profiler_enabled
    trained(None, TorchProfiler(0, 1, 1, folder=tmp_path / "second"))  # another can start
    assert len(traces(tmp_path / "second")) == 1


def test_without_a_folder_and_a_run_there_is_a_clear_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = trained(None, TorchProfiler())
    assert trainer.status == "completed"
    assert "no folder to write to, because this training run has no run folder" in caplog.text
    assert "TorchProfiler(folder='…')" in caplog.text
