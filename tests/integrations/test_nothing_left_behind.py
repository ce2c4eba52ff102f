"""A session that cannot start, is interrupted or attached twice leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import interrupted_sessions
import pytest
import torch
from interrupted_sessions import (
    Counts,
    Doubles,
    describe,
    find_threads,
    make,
    make_hooks,
    step,
    use_session,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hookline
from hookline.probes import Capture, Edit


@pytest.fixture(autouse=True)
def _leave_out_threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupted_sessions, "other_threads", set(threading.enumerate()))


class FailsAtStart(hookline.Hook):
    """Fails when training starts."""

    critical = True

    def __init__(self, error: type[BaseException] = ValueError) -> None:
        self.error = error

    def on_train_start(self) -> None:
        raise self.error


def failing_attach(case: str, folder: Path) -> dict[str, Any]:
    """Return arguments of an attach that cannot start, with the hooks of one that can."""
    if case == "typo":
        return {"hooks": [*make_hooks(), Capture("typo")]}
    if case == "no run folder":
        (folder / "file").write_text("in the way")
        return {"hooks": make_hooks(), "runs": folder / "file"}
    error = KeyboardInterrupt if case == "ctrl-c" else ValueError
    return {"hooks": [*make_hooks(), FailsAtStart(error)], "runs": folder / "runs"}


def statuses(folder: Path) -> list[str]:
    """Return the statuses of the runs in a folder."""
    manifests = [json.loads(file.read_text()) for file in folder.glob("*/manifest.json")]
    return sorted(manifest["status"] for manifest in manifests)


CASES = ("typo", "no run folder", "critical hook", "ctrl-c")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["with", "without with"])
def test_a_session_that_cannot_start_leaves_the_loop_as_it_was(tmp_path, case, how):
    model, optimizer, scaler = make()
    before = describe(model, optimizer, scaler)
    with pytest.raises((hookline.HooklineError, KeyboardInterrupt)):
        session = hookline.attach(model, optimizer, scaler=scaler, **failing_attach(case, tmp_path))
        if how == "with":
            with session:
                pytest.fail("it has started")
        step(model, optimizer, scaler)
    assert describe(model, optimizer, scaler) == before
    assert find_threads() == []
    expected = {"critical hook": ["error"], "ctrl-c": ["interrupted"]}
    assert statuses(tmp_path / "runs") == expected.get(case, [])

    doubles, counts = Doubles(), Counts()
    runs = tmp_path / "corrected"
    with hookline.attach(model, optimizer, hooks=[doubles, counts], scaler=scaler, runs=runs):
        step(model, optimizer, scaler)
        step(model, optimizer, scaler)
    assert (doubles.calls, counts.steps) == (2, 2)
    assert statuses(runs) == ["completed"]
    assert describe(model, optimizer, scaler) == before


def test_hooks_see_the_end_of_a_training_that_a_later_hook_kept_from_starting():
    class Sees(hookline.Hook):
        def __init__(self):
            self.seen = []

        def on_train_start(self):
            self.seen.append("start")

        def on_exception(self, exception):
            self.seen.append(type(exception).__name__)

        def on_train_end(self):
            self.seen.append("end")

    model, optimizer, _ = make()
    sees = Sees()
    with pytest.raises(hookline.HookFailedError):
        hookline.attach(model, optimizer, hooks=[sees, FailsAtStart()]).__enter__()
    assert sees.seen == ["start", "HookFailedError", "end"]


def test_a_session_that_refuses_the_loop_in_the_first_step_has_ended():
    class NeedsEpochs(hookline.Hook):
        def on_step_end(self, epoch):
            pass

    model, optimizer, scaler = make()
    before = describe(model, optimizer, scaler)
    hookline.attach(model, optimizer, hooks=[*make_hooks(), NeedsEpochs()], scaler=scaler)
    with pytest.raises(hookline.NotSuppliedError):
        step(model, optimizer, scaler)
    assert describe(model, optimizer, scaler) == before


def test_a_probe_of_a_failed_attach_works_in_the_corrected_one():
    model, optimizer, scaler = make()
    capture = Capture("2")
    with pytest.raises(hookline.HooklineError):
        hookline.attach(model, optimizer, hooks=[capture, Capture("typo")], scaler=scaler)
    with hookline.attach(model, optimizer, hooks=[capture], scaler=scaler):
        step(model, optimizer, scaler)
        step(model, optimizer, scaler)
    assert [state.step for state in capture.states()] == [0, 1]


def test_toggling_hooks_after_the_end_attaches_nothing():
    model, optimizer, scaler = make()
    before = describe(model, optimizer, scaler)
    with hookline.attach(model, optimizer, hooks=make_hooks(), scaler=scaler) as session:
        step(model, optimizer, scaler)
    session.disable_hook("counts")
    session.enable_hook("counts")
    session.add_hook(Capture("0"))
    assert describe(model, optimizer, scaler) == before


def test_ctrl_c_in_on_exception_leaves_nothing_behind(tmp_path):
    class Interrupted(hookline.Hook):
        def __init__(self):
            self.seen = []

        def on_exception(self):
            self.seen.append("exception")
            raise KeyboardInterrupt

        def on_train_end(self):
            self.seen.append("end")

    model, optimizer, scaler = make()
    before, hook = describe(model, optimizer, scaler), Interrupted()
    hooks = [*make_hooks(), hook]
    with (
        pytest.raises(KeyboardInterrupt),
        hookline.attach(model, optimizer, hooks=hooks, scaler=scaler, runs=tmp_path),
    ):
        raise ValueError
    assert hook.seen == ["exception", "end"]
    assert describe(model, optimizer, scaler) == before
    assert find_threads() == []
    assert statuses(tmp_path) == ["error"]


def test_a_session_can_be_detached_in_another_thread(tmp_path):
    model, optimizer, scaler = make()
    handler = signal.getsignal(signal.SIGTERM)
    received = []
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
        before = describe(model, optimizer, scaler)
        session = hookline.attach(
            model, optimizer, hooks=make_hooks(), scaler=scaler, runs=tmp_path, report=False
        )
        step(model, optimizer, scaler)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(session.detach).result()
        signal.raise_signal(signal.SIGTERM)  # Python sets handlers in the main thread only
        after = describe(model, optimizer, scaler)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert {name for name in before if after[name] != before[name]} <= {"signals"}
    assert received == [signal.SIGTERM]
    assert statuses(tmp_path) == ["completed"]


def test_a_loop_that_goes_on_after_the_end_calls_no_hooks():
    events = []

    class Sees(hookline.Hook):
        def on_train_batch_start(self):
            events.append("batch")

        def on_epoch_start(self):
            events.append("epoch")

        def on_validation_start(self):
            events.append("validation")

        def on_before_backward(self):
            events.append("backward")

        def on_train_end(self):
            events.append("end")

    model, optimizer, _ = make()
    session = hookline.attach(model, optimizer, hooks=[Sees()])
    for _ in range(2):
        with session.epoch():
            for batch in session.batches([torch.ones(3, 4)]):
                session.backward(model(batch).sum())
                optimizer.step()
            with session.validation():
                pass
        session.detach()
    assert events == ["epoch", "batch", "backward", "validation", "end"]


# -- Ctrl-C at any line ---------------------------------------------------------------------------

_SOURCE = str(Path(hookline.__file__).parent)


class Interrupt:
    """Sends SIGINT to this process at one of the lines that Hookline runs.

    Attributes:
        place: the function and the line; None if fewer lines ran.
    """

    def __init__(self, line: int, times: int = 1) -> None:
        self.place: tuple[str, int] | None = None
        self._left, self._times = line, times

    def __enter__(self) -> Interrupt:
        gc.disable()  # Python drops what is raised while it frees objects, such as this interrupt
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_SOURCE):
            return None
        if event == "line" and self.place is None:
            self._left -= 1
            if self._left == 0:
                self.place = (frame.f_code.co_name, frame.f_lineno - frame.f_code.co_firstlineno)
                for _ in range(self._times):
                    signal.raise_signal(signal.SIGINT)
        return self._trace


def interrupt_at(line: int, runs: Path | None) -> tuple[tuple[str, int] | None, dict[str, Any]]:
    """Use a session with Ctrl-C at this line; return where that was, and what is left."""
    model, optimizer, scaler = make()
    before = describe(model, optimizer, scaler)
    interrupt = Interrupt(line)
    with contextlib.suppress(KeyboardInterrupt), interrupt:
        use_session(model, optimizer, scaler, runs)
    after = describe(model, optimizer, scaler)
    left = {name: after[name] for name in before if after[name] != before[name]}
    if threads := find_threads():
        left["threads"] = threads
    return interrupt.place, left


def detach_all() -> None:
    """Detach the sessions that an interrupt has left, so that they are not freed in a later one."""
    for each in gc.get_objects():
        if type(each) is hookline.Session:
            each.detach()
    gc.collect()


@pytest.mark.parametrize("with_run", [False, True])
def test_ctrl_c_at_any_line_of_a_session_leaves_nothing_behind(tmp_path, with_run):
    """The first lines of `__enter__` and `__exit__` are left out: Python cannot protect them."""
    runs = tmp_path / "runs" if with_run else None
    use_session(*make(), runs)  # imports
    line, left = 1, {}
    while True:
        place, found = interrupt_at(line, runs)
        if place is None:
            break
        if found and place not in (("__enter__", 1), ("__exit__", 6)):
            left[line, place] = found
        elif found:
            detach_all()
        line += 1999 if with_run else 97
    assert line > 2000
    assert left == {}
    if runs is not None:
        assert set(statuses(runs)) <= {"completed", "interrupted"}


def test_ctrl_c_while_a_probe_is_attached_leaves_the_model_as_it_was():
    model, optimizer, _ = make()
    before = describe(model, optimizer)
    line, place = 0, ("", 0)
    while place is not None:
        line += 7
        interrupt = Interrupt(line)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            Capture("**").attach(model)
        place = interrupt.place
        if place is not None:
            assert describe(model, optimizer) == before, place


# -- attached twice -------------------------------------------------------------------------------


def test_a_cell_that_attaches_and_is_run_twice_has_its_hooks_called_once(tmp_path, caplog):
    model, optimizer, scaler = make()
    before = describe(model, optimizer, scaler)
    both = []
    for _ in range(2):
        hooks = [Doubles(), Counts()]
        both.append(hooks)
        session = hookline.attach(model, optimizer, hooks=hooks, scaler=scaler, runs=tmp_path)
        step(model, optimizer, scaler)
    assert [(doubles.calls, counts.steps) for doubles, counts in both] == [(1, 1), (1, 1)]
    assert "An equal session (hooks: 'doubles', 'counts')" in caplog.text
    session.detach()
    assert statuses(tmp_path) == ["completed", "stopped"]
    assert describe(model, optimizer, scaler) == before


def test_two_sessions_with_different_hooks_are_attached_at_the_same_time(caplog):
    model, optimizer, scaler = make()
    hooks = [Counts(), Capture("0"), Capture("2")]
    sessions = [hookline.attach(model, optimizer, hooks=[hook], scaler=scaler) for hook in hooks]
    step(model, optimizer, scaler)
    for session in sessions:
        session.detach()
    assert hooks[0].steps == len(hooks[1].states()) == len(hooks[2].states()) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- Hookline's trainer ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["no run folder", "critical hook", "ctrl-c"])
def test_a_trainer_that_cannot_start_leaves_the_model_as_it_was(tmp_path, case):
    model, optimizer, _ = make()
    before = describe(model, optimizer)
    given = failing_attach(case, tmp_path)
    config = {"runs": given.get("runs"), "progress": "off", "report": False, "max_epochs": 1}
    trainer = hookline.Trainer(config, model, optimizer, hooks=given["hooks"], loss_fn=F.mse_loss)
    data = [(torch.ones(3, 4), torch.zeros(3, 2))] * 2
    with pytest.raises((hookline.HooklineError, KeyboardInterrupt)):
        trainer.fit(data)
    assert describe(model, optimizer) == before
    assert find_threads() == []

    doubles = Doubles()
    config["runs"] = tmp_path / "corrected"
    hookline.Trainer(config, model, optimizer, hooks=[doubles], loss_fn=F.mse_loss).fit(data)
    assert doubles.calls == 2
    assert statuses(tmp_path / "corrected") == ["completed"]
    assert describe(model, optimizer) == before


def test_a_second_ctrl_c_at_any_line_of_a_training_leaves_nothing_behind(tmp_path):
    """The first Ctrl-C waits for the end of a step, the second acts at once."""
    data = [(torch.ones(3, 4), torch.zeros(3, 2))] * 2
    line, place = 1, ("", 0)
    while place is not None:
        model, optimizer, _ = make()
        before = describe(model, optimizer)
        config = {"runs": tmp_path, "progress": "off", "report": False, "max_epochs": 1}
        hooks = make_hooks()
        trainer = hookline.Trainer(config, model, optimizer, hooks=hooks, loss_fn=F.mse_loss)
        interrupt = Interrupt(line, times=2)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            trainer.fit(data)
        place = interrupt.place
        assert describe(model, optimizer) == before, place
        assert find_threads() == [], place
        line += 2999
    assert line > 10_000


# -- other libraries' trainers --------------------------------------------------------------------


def wrapped_names(*objects: Any) -> list[str]:
    """Return the methods that were replaced on these objects."""
    return [
        name for each in objects for name in vars(each) if callable(getattr(type(each), name, None))
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["transformers", "lightning", "ignite"])
def test_a_trainer_of_a_library_that_cannot_start_is_as_it_was(tmp_path, name, case):
    host, train, parts, model = make_host(name, tmp_path / "output")
    holders = [host, getattr(host, "callback_handler", host), getattr(host, "strategy", host)]
    callbacks = list(getattr(holders[1], "callbacks", ()))
    before = describe(model, torch.optim.SGD(model.parameters()), parts.get("scaler"))
    options = failing_attach(case, tmp_path)
    if name != "ignite":
        edit = Edit("layers.0", "scale", 0.5, enable_intervention=True)
        options["hooks"] = [edit, *options["hooks"][2:]]
    hookline.attach(host, **parts, **options)
    with pytest.raises((hookline.HooklineError, KeyboardInterrupt, SystemExit)):
        train()
    assert describe(model, torch.optim.SGD(model.parameters()), parts.get("scaler")) == before
    assert wrapped_names(*holders) == []
    assert list(getattr(holders[1], "callbacks", ())) == callbacks
    assert not any(getattr(host, "_event_handlers", {}).values())
    assert find_threads() == []

    if name == "ignite":  # an engine runs once after an error
        host, train, parts, _ = make_host(name, tmp_path)
    doubles, counts = Doubles(), Counts()
    hookline.attach(host, **parts, hooks=[Counts()])
    hookline.attach(host, **parts, hooks=[doubles, counts])
    hookline.attach(host, **parts, hooks=[doubles, counts])  # replaces the one before
    host.should_stop = False  # which Ctrl-C has set in Lightning's
    train()
    assert (doubles.calls, counts.steps) == (2, 2)


def test_an_equal_session_of_an_ignite_engine_is_replaced(caplog):
    from ignite.engine import Engine

    model, optimizer, scaler = make()
    engine = Engine(lambda engine, batch: step(model, optimizer, scaler))
    hooks = [Counts(), Capture("0"), Counts()]
    for hook in hooks:
        hookline.attach(engine, model=model, optimizer=optimizer, scaler=scaler, hooks=[hook])
    engine.run([0, 0])
    assert (hooks[0].steps, len(hooks[1].states()), hooks[2].steps) == (0, 2, 2)
    assert caplog.text.count("An equal session") == 1
    assert wrapped_names(engine) == []


def make_host(name: str, folder: Path) -> tuple[Any, Any, dict[str, Any], Any]:
    """Return another library's trainer, a function that trains two steps, options and model."""
    model, optimizer, scaler = make()
    if name == "ignite":
        from ignite.engine import Engine

        engine = Engine(lambda engine, batch: step(model, optimizer, scaler))
        parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
        return engine, lambda: engine.run([0, 0]), parts, model
    if name == "lightning":
        import lightning.pytorch as pl

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.layers = model

            def training_step(self, batch, batch_idx):
                return self.layers(batch).sum()

            def configure_optimizers(self):
                return optimizer

        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
        trainer = pl.Trainer(accelerator="cpu", max_steps=2, enable_progress_bar=False, **quiet)
        data = DataLoader(torch.ones(8, 4), batch_size=2)
        return trainer, lambda: trainer.fit(Module(), data), {}, model
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return {"loss": self.layers(x).sum()}

    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(folder), max_steps=2, **options)
    data = [{"x": torch.ones(4)}] * 8
    host = Trainer(Net(), arguments, train_dataset=data)
    return host, lambda: host.train(), {}, model


@pytest.mark.parametrize("how", ["with", "detach"])
@pytest.mark.parametrize("name", ["transformers", "lightning", "ignite"])
def test_a_session_that_ends_before_training_leaves_the_trainer_as_it_was(tmp_path, name, how):
    host, train, parts, _ = make_host(name, tmp_path)
    unused, used = Counts(), Counts()
    session = hookline.attach(host, hooks=[unused], **parts)
    if how == "detach":
        session.detach()
    else:
        with pytest.raises(ValueError, match="before training"), session:
            raise ValueError("before training")
    assert wrapped_names(host) == []
    hookline.attach(host, hooks=[used, Capture("**")], **parts).detach()
    train()  # without hooks
    assert (unused.steps, used.steps) == (0, 0)
