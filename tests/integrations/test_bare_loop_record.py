"""The record of a bare loop: the same folder as the trainer's, and nothing without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops import batches, make, recorder, train
from torch.nn import functional as F

import hookline
from hookline.errors import NotSuppliedError, RunError
from hookline.runs import OpenedRun, Run, open_run


def only(folder: Path) -> OpenedRun:
    (path,) = folder.iterdir()
    return open_run(path)


def rows(run: OpenedRun, *names: str) -> list[Any]:
    return [(row["step"], row["epoch"], row["value"]) for row in run.metrics(*names)]


def test_an_unchanged_loop_leaves_a_run_with_the_loss_of_each_step(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path) as session:
        assert session.run is not None
        assert open_run(session.run.path).status == "training"
        losses = train(model, optimizer, batches(5))
    run = only(tmp_path)
    assert rows(run, "train/loss") == [(i + 1, None, loss) for i, loss in enumerate(losses)]
    assert (run.status, run.damage) == ("completed", [])
    assert session.run.id == run.id
    assert session.run.metrics_log is None  # it is closed
    assert [event["kind"] for event in run.events()] == ["start", "end"]
    assert run.manifest["devices"]["used"] == "cpu"


def test_the_report_at_the_end_can_be_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOKLINE_REPORT", "1")
    written = []
    for wanted in (True, False):
        model, optimizer = make()
        with hookline.attach(model, optimizer, runs=tmp_path, report=wanted) as session:
            train(model, optimizer, batches(2))
        assert session.run is not None
        written.append((session.run.path / "report.html").exists())
    assert written == [True, False]


def test_without_a_folder_nothing_of_the_record_is_loaded_or_put_on_the_model() -> None:
    script = (
        "import logging, sys, torch, hookline; logging.basicConfig(level=10)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with hookline.attach(model, optimizer) as session:\n"
        "    assert not model._forward_hooks and not model._forward_pre_hooks\n"
        "    for _ in range(2):\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n"
        "    session.log('gradients/norm', 1.0); session.log('a', [1], kind='histogram')\n"
        "assert session.run is None\n"
        "assert not [name for name in sys.modules if name.startswith('hookline.runs')]\n"
        "print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


def test_everything_a_loop_tells_is_recorded(tmp_path: Path) -> None:
    model, optimizer = make()
    watch = recorder("on_step_end")
    with hookline.attach(model, optimizer, [watch], runs=tmp_path, config={"seed": 5}) as session:
        for _ in range(2):
            with session.epoch() as epoch:
                for x, y in session.batches(batches(2)):
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(x), y)
                    loss.backward()
                    session.log("size", 4.0)
                    optimizer.step()
                with session.validation():
                    for value in (1.0, 3.0):
                        session.log("loss", value)
                        session.log("right", value)
            session.notify_checkpoint_saved(tmp_path / f"{epoch}.pt")
            if epoch == 0:
                session.disable_hook("recorder")
    run = only(tmp_path)
    assert rows(run, "train/size") == [(1, 0, 4.0), (2, 0, 4.0), (3, 1, 4.0), (4, 1, 4.0)]
    losses = rows(run, "train/loss")
    assert [(step, epoch) for step, epoch, _ in losses] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    first, second = rows(run, "train/loss_epoch")
    assert first == (2, 0, pytest.approx((losses[0][2] + losses[1][2]) / 2))
    assert second == (4, 1, pytest.approx((losses[2][2] + losses[3][2]) / 2))
    assert rows(run, "train/size_epoch") == [(2, 0, 4.0), (4, 1, 4.0)]
    assert rows(run, "val/loss") == [(2, 0, 2.0), (4, 1, 2.0)]
    assert rows(run, "val/right") == rows(run, "val/loss")
    assert len(run.metrics()) == 4 + 4 + 2 + 2 + 2 + 2
    kinds = [event["kind"] for event in run.events()]
    assert kinds == ["start", "checkpoint", "hooks", "checkpoint", "end"]
    assert run.events("checkpoint")[1]["path"] == str(tmp_path / "1.pt")
    assert run.events("hooks")[0]["hooks"] == {"recorder": "disabled"}
    (hook,) = run.events("end")[0]["hooks"]["hooks"]
    assert (hook["name"], hook["calls"]) == ("recorder", 2)
    assert run.manifest["hooks"][0]["enabled"] is True
    assert run.manifest["config"] == {"seed": 5}
    assert run.manifest["seed"] == 5


def test_a_name_with_a_slash_and_other_kinds_go_to_the_record_as_they_stand(
    tmp_path: Path,
) -> None:
    class Measures(hookline.Hook):
        def on_step_end(self, trainer: Any, model: Any, metrics: Any = None) -> None:
            trainer.log("norm/first", model.first.weight.norm())
            trainer.log("weights", model.first.weight, kind="histogram")
            trainer.log_dict({"lr/a": 0.1, "lr/b": 0.2})

    ends = recorder(on_epoch_end=("metrics",), on_train_batch_end=("metrics",))
    model, optimizer = make()
    with (
        hookline.attach(model, optimizer, [Measures(), ends], runs=tmp_path) as session,
        session.epoch(),
    ):
        for x, y in session.batches(batches(2)):
            F.mse_loss(model(x), y).backward()
            session.log("own/number", 7)
            optimizer.step()
        session.log("note", "so far", kind="text")
    run = only(tmp_path)
    names = [row["name"] for row in run.metrics("norm/*", "lr/*", "own/*")]
    assert names == ["own/number", "norm/first", "lr/a", "lr/b"] * 2
    assert [row["kind"] for row in run.metrics("weights")] == ["histogram"] * 2
    assert rows(run, "note") == [(2, 0, "so far")]
    # They are no metrics of the batch or the epoch.
    assert all(set(told["metrics"]) <= {"loss", "train/loss"} for _, told in ends.told)


def test_a_value_that_is_logged_after_its_step_belongs_to_it(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path) as session:
        for i, (x, y) in enumerate(session.batches(batches(2))):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            session.log("late", i)
    assert rows(only(tmp_path), "train/late") == [(1, None, 0), (2, None, 1)]


def test_what_a_hook_logs_of_a_saved_checkpoint_is_no_number_of_the_loop(tmp_path: Path) -> None:
    class Sizes(hookline.Hook):
        def on_checkpoint_save(self, trainer: Any, path: Path) -> None:
            trainer.log("size", sum(file.stat().st_size for file in Path(path).iterdir()))

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Sizes()], runs=tmp_path) as session:
        train(model, optimizer, batches(2))
        session.save_checkpoint(wait=True)
    assert [row["name"] for row in only(tmp_path).metrics("size", "train/size")] == ["size"]


def backward_on_many_numbers(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    losses = F.mse_loss(outputs, targets, reduction="none")
    losses.backward(torch.ones_like(losses))


def test_with_accumulation_a_step_has_the_mean_of_what_was_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path / "untold"):
        for i, (x, y) in enumerate(batches(4)):
            backward_on_many_numbers(model(x), y)
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    run = only(tmp_path / "untold")
    assert rows(run, "train/*") == []
    assert caplog.text.count("The run has no train/loss") == 1
    with hookline.attach(model, optimizer, runs=tmp_path / "told") as session:
        for i, (x, y) in enumerate(batches(4)):
            backward_on_many_numbers(model(x), y)
            session.log("loss", float(i))
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert rows(only(tmp_path / "told"), "train/loss") == [(1, None, 0.5), (2, None, 2.5)]
    with hookline.attach(model, optimizer, runs=tmp_path / "backward") as session:
        losses = []
        for i, (x, y) in enumerate(batches(4)):
            loss = F.mse_loss(model(x), y)
            session.backward(loss, accumulate=2)
            losses.append(loss.item())
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    found = [value for _, _, value in rows(only(tmp_path / "backward"), "train/loss")]
    means = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]
    assert found == pytest.approx(means)
    assert caplog.text.count("no train/loss") == 1


def test_a_step_whose_loss_cannot_be_seen_has_none_in_the_record(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path):
        for can_be_seen in (True, False, True):
            optimizer.zero_grad()
            for x, y in batches(2):
                if can_be_seen:
                    F.mse_loss(model(x), y).backward()
                else:
                    backward_on_many_numbers(model(x), y)
            optimizer.step()
    assert [step for step, _, _ in rows(only(tmp_path), "train/loss")] == [1, 3]


def test_hooks_get_the_run_and_only_where_there_is_one(tmp_path: Path) -> None:
    hook = recorder(on_train_start=("run",), on_step_end=("run",))
    model, optimizer = make()
    with hookline.attach(model, optimizer, [hook], runs=str(tmp_path)) as session:
        train(model, optimizer, batches(1))
    assert [told["run"] for _, told in hook.told] == [session.run] * 2
    with (
        pytest.raises(NotSuppliedError, match="'run'"),
        hookline.attach(model, optimizer, [recorder(on_step_end=("run",))]),
    ):
        train(model, optimizer, batches(1))


def test_hooks_may_come_and_go_and_the_losses_stay(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path) as session:
        train(model, optimizer, batches(1))
        session.add_hook(recorder("on_after_forward"), "one")
        train(model, optimizer, batches(1))
        session.remove_hook("one")
        train(model, optimizer, batches(1))
    run = only(tmp_path)
    assert [step for step, _, _ in rows(run, "train/loss")] == [1, 2, 3]
    events = [event["hooks"] for event in run.events("hooks")]
    assert events == [{"one": "enabled"}, {"one": "removed"}]


def test_a_failure_at_the_end_of_training_is_in_the_manifest(tmp_path: Path) -> None:
    class Report(hookline.Hook):
        critical = True

        def on_train_end(self) -> None:
            raise OSError("no report")

    model, optimizer = make()
    session = hookline.attach(model, optimizer, hooks=[Report()], runs=tmp_path)
    train(model, optimizer, batches(1))
    with pytest.raises(hookline.HooklineError, match="no report"):
        session.detach()
    manifest = only(tmp_path).manifest
    assert manifest["status"] == manifest["attempts"][-1]["status"] == "error"
    assert "no report" in manifest["last_error"]


def test_how_it_ended_is_in_the_manifest(tmp_path: Path) -> None:
    def ends(name: str, error: BaseException | None = None, stop: bool = False) -> OpenedRun:
        model, optimizer = make()
        try:
            with hookline.attach(model, optimizer, runs=tmp_path / name) as session:
                for x, y in session.batches(batches(3)):
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
                    if stop:
                        session.stop("enough")
                    if error is not None:
                        raise error
        except (ValueError, KeyboardInterrupt) as raised:
            if raised is not error:
                raise
        return only(tmp_path / name)

    stopped = ends("stopped", stop=True)
    assert stopped.status == "stopped"
    assert stopped.events("end")[0]["reason"] == "enough"
    failed = ends("failed", ValueError("no"))
    assert (failed.status, failed.manifest["last_error"]) == ("error", "ValueError: no")
    assert len(rows(failed, "train/loss")) == 1
    assert ends("interrupted", KeyboardInterrupt()).status == "interrupted"


def test_a_folder_that_cannot_be_written_is_a_clear_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, optimizer = make()
    with (
        pytest.raises(RunError, match="Cannot create a run"),
        hookline.attach(model, optimizer, runs=tmp_path / "file"),
    ):
        pass
    assert not model._forward_hooks


def test_a_run_goes_on_in_another_process_under_its_id(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path) as session:
        train(model, optimizer, batches(2))
        state = session.state_dict()
        train(model, optimizer, batches(1))
    assert session.run is not None
    run = Run.open(session.run.path, resume=True)
    again = hookline.attach(model, optimizer, runs=run)
    again.load_state_dict(state)
    with again:
        train(model, optimizer, batches(2))
    found = only(tmp_path)
    assert again.run is run
    assert (found.id, found.status, len(found.manifest["attempts"])) == (run.id, "completed", 2)
    assert [step for step, _, _ in rows(found, "train/loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {}),
        (SimpleNamespace(lr=0.1), {"lr": 0.1}),
        ("fast", {"config": "fast"}),
        (hookline.HooksConfig(), hookline.HooksConfig().model_dump(mode="json")),
    ],
)
def test_any_configuration_is_recorded(tmp_path: Path, config: Any, expected: Any) -> None:
    with hookline.attach(*make(), runs=tmp_path, config=config):
        pass
    assert only(tmp_path).manifest["config"] == expected


def test_where_the_run_is_and_why_it_stopped_is_shown_without_logging(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path) as session:
        for batch in session.batches(batches(3)):
            session.stop("enough")
            train(model, optimizer, [batch])
    assert session.run is not None
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [f"run {session.run.path}", "stopped after 1 steps: enough"]
    assert shown.out == ""


def test_only_the_first_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    hook = recorder(on_step_end=("run",))
    model, optimizer = make()
    with hookline.attach(model, optimizer, [hook], runs=tmp_path) as session:
        train(model, optimizer, batches(1))
        session.log("a", 1.0)
        session.log("a/b", 1.0)
    assert session.run is None
    assert hook.told == [("on_step_end", {"run": None})]
    assert not list(tmp_path.iterdir())


def test_what_is_logged_when_training_is_over_is_dropped(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path) as session:
        train(model, optimizer, batches(1))
    session.log("a/b", 1.0)
    session.log("a", 1.0)
    assert rows(only(tmp_path), "a*", "train/a") == []


def test_monitors_write_a_run_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hookline.LRMonitor()]) as session:
        train(model, optimizer, batches(2))
    assert session.run is not None
    assert len(rows(only(tmp_path / "runs"), "lr*")) == 2


def test_hooks_that_record_nothing_write_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[recorder("on_step_end")]):
        train(model, optimizer, batches(1))
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_kept_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hookline.LRMonitor()], runs=None):
        train(model, optimizer, batches(3))
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("is not kept") == 1
    assert "attach(…, runs='runs')" in caplog.text


def test_values_logged_after_a_step_belong_to_it_without_batches_too(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path) as session:
        for i, (x, y) in enumerate(batches(3)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            session.log("before", i)
            loss.backward()
            optimizer.step()
            session.log("after", i)
    run = only(tmp_path)
    for name in ("before", "after"):
        assert rows(run, f"train/{name}") == [(1, None, 0), (2, None, 1), (3, None, 2)]


def test_the_last_value_is_kept_in_a_loop_whose_calls_are_not_seen(tmp_path: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path) as session:
        for i, (x, y) in enumerate(batches(2)):
            F.mse_loss(model.forward(x), y).backward()
            optimizer.step()
            session.log("after", i)
    assert [value for _, _, value in rows(only(tmp_path), "train/after")] == [0, 1]


@pytest.mark.parametrize(
    ("ending", "status", "error"),
    [
        ("", "completed", None),
        ("raise RuntimeError('boom')", "error", "RuntimeError: boom"),
    ],
)
def test_a_session_that_is_never_detached_ends_with_the_interpreter(
    tmp_path: Path, ending: str, status: str, error: str | None
) -> None:
    script = (
        "import torch, hookline\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "hooks = [hookline.ModelCheckpoint(every_n_steps=3)]\n"
        f"session = hookline.attach(model, optimizer, hooks=hooks, runs={str(tmp_path)!r})\n"
        "for _ in range(3):\n"
        "    model(torch.ones(4, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        f"{ending}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    run = only(tmp_path)
    assert (run.status, run.manifest["last_error"]) == (status, error)
    saved = sorted(p.name for p in (run.path / "checkpoints").glob("*step=3"))
    assert saved == ([] if status == "error" else ["epoch=0-step=3"])  # the last step's
