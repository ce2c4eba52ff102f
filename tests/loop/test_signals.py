"""Signals: a training process saves, ends, and can be resumed exactly."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_training import compare_ends, find_resumable, newest_run, train
from warm_processes import WarmParent

import hookline


class SendSignal(hookline.Hook):
    """Sends this process a signal in the n-th call of an event.

    Args:
        event: the event.
        name: the signal.
        call: in which call.
        times: how often.
    """

    def __init__(self, event: str, name: str, call: int, times: int = 1) -> None:
        self._left = call

        def send() -> None:
            self._left -= 1
            if self._left == 0:
                for _ in range(times):
                    os.kill(os.getpid(), getattr(signal, name))

        setattr(self, event, send)


def train_and_signal(folder: str, event: str, name: str, call: str, times: str) -> None:
    """Train, send a signal in an event, and print how training ended."""
    trainer = train(Path(folder), SendSignal(event, name, int(call), int(times)))
    print_end(trainer)


def train_and_signal_in_save(folder: str) -> None:
    """Train, and send SIGTERM while a file of the third checkpoint is synced."""
    sent = False
    names: set[str] = set()

    def patch(real: Any) -> Any:
        def sync(handle: int) -> None:
            nonlocal sent
            name = str(Path(f"/proc/self/fd/{handle}").readlink())
            if "/checkpoints/.tmp-" in name:
                names.add(name.partition("/.tmp-")[2].partition("/")[0])
                if len(names) > 6 and not sent:
                    sent = True
                    os.kill(os.getpid(), signal.SIGTERM)
            real(handle)

        return sync

    os.fsync, os.fdatasync = patch(os.fsync), patch(os.fdatasync)
    trainer = train(Path(folder))
    assert sent
    print_end(trainer)


def train_to_the_end(folder: str) -> None:
    """Continue the run in a folder, or start one."""
    print_end(train(Path(folder)))


def print_end(trainer: Any) -> None:
    """Print how training ended, as the last line."""
    handlers = {n: signal.getsignal(getattr(signal, n)) for n in ("SIGTERM", "SIGUSR1", "SIGUSR2")}
    end = {
        "status": trainer.status,
        "signal": getattr(trainer, "stop_signal", None),
        "step": trainer.step,
        "handlers": [n for n, handler in handlers.items() if handler is not signal.SIG_DFL],
    }
    print(json.dumps(end))


def read_end(output: str) -> dict[str, Any]:
    """Return what `print_end` printed."""
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def parent() -> Iterator[WarmParent]:
    with WarmParent() as parent:
        yield parent


@pytest.fixture(scope="module")
def whole(parent: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    process = parent.start(train_to_the_end, folder, log=folder / "log.txt")
    assert process.wait() == 0, process.output
    return folder


def check_resumed(parent: WarmParent, whole: Path, folder: Path) -> None:
    """Resume a run and check that it ends like the one that was not interrupted."""
    runs = list((folder / "runs").iterdir())
    process = parent.start(train_to_the_end, folder, log=folder / "resumed.txt")
    assert process.wait() == 0, process.output
    assert list((folder / "runs").iterdir()) == runs
    assert compare_ends(whole, folder) == []


@pytest.mark.soak(every=2)
@pytest.mark.parametrize(
    ("event", "call"),
    [
        pytest.param("on_train_start", 1, id="before the first step"),
        pytest.param("on_train_batch_start", 1, id="in the first step"),
        pytest.param("on_train_batch_end", 3, id="within an accumulation group"),
        pytest.param("on_step_end", 10, id="in the last step of an epoch"),
        pytest.param("on_validation_batch_start", 3, id="in validation"),
        pytest.param("on_validation_batch_end", 10, id="in validation at the end of an epoch"),
        pytest.param("on_checkpoint_save", 3, id="after a save"),
    ],
)
def test_sigterm_saves_and_ends_and_the_run_can_be_resumed_exactly(
    parent: WarmParent, whole: Path, tmp_path: Path, event: str, call: int
) -> None:
    process = parent.start(
        train_and_signal, tmp_path, event, "SIGTERM", call, 1, log=tmp_path / "log.txt"
    )
    assert process.wait() == 0, process.output
    end = read_end(process.output)
    assert (end["status"], end["signal"]) == ("preempted", "SIGTERM")
    assert end["handlers"] == []  # those from before are back
    run = hookline.open_run(newest_run(tmp_path))
    assert run.status == "preempted"
    found = find_resumable(tmp_path / "runs")
    assert found is not None
    check_resumed(parent, whole, tmp_path)


def train_and_signal_all(folder: str, name: str) -> None:
    """Train, send a signal to this process and the loader's workers, and print the end."""
    batches = 0

    def send() -> None:
        nonlocal batches
        batches += 1
        if batches == 15:  # the first of a step with two
            # From another process, as a scheduler does: workers treat their parent's otherwise.
            command = ["kill", "-s", name.removeprefix("SIG"), "--", f"-{os.getpid()}"]
            subprocess.Popen(command, start_new_session=True)

    hook = hookline.Hook()
    hook.on_train_batch_end = send
    try:
        trainer = train(Path(folder), hook)
    except KeyboardInterrupt:
        print("KeyboardInterrupt")
        return
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises for a worker that ends late
    print_end(trainer)


@pytest.mark.soak(every=3)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_to_all_processes_of_a_job_saves_too(
    parent: WarmParent, whole: Path, tmp_path: Path, name: str
) -> None:
    process = parent.start(train_and_signal_all, tmp_path, name, log=tmp_path / "log.txt")
    assert process.wait() == 0, process.output
    if name == "SIGINT":
        assert "KeyboardInterrupt" in process.output
    else:
        assert read_end(process.output)["status"] == "preempted"
    check_resumed(parent, whole, tmp_path)


def test_sigterm_in_validation_does_not_wait_for_its_end(
    parent: WarmParent, tmp_path: Path
) -> None:
    process = parent.start(train_and_signal_and_count, tmp_path, log=tmp_path / "log.txt")
    assert process.wait() == 0, process.output
    assert read_end(process.output)["status"] == "preempted"
    assert "1 batch after the signal" not in process.output
    assert "0 batches after the signal" in process.output


def train_and_signal_and_count(folder: str) -> None:
    """Send SIGTERM in the first batch of validation, and print how many more there were."""

    class Count(hookline.Hook):
        batches = -1

        def on_validation_batch_start(self) -> None:
            self.batches += 1
            if self.batches == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_end(self) -> None:
            print(f"{self.batches} batches after the signal")

    print_end(train(Path(folder), Count()))


@pytest.mark.soak(every=2)
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_user_signals_preempt_too(
    parent: WarmParent, whole: Path, tmp_path: Path, name: str
) -> None:
    process = parent.start(
        train_and_signal, tmp_path, "on_step_end", name, 7, 1, log=tmp_path / "log.txt"
    )
    assert process.wait() == 0, process.output
    end = read_end(process.output)
    assert (end["status"], end["signal"], end["step"]) == ("preempted", name, 7)
    check_resumed(parent, whole, tmp_path)


def test_sigterm_during_a_save_leaves_complete_checkpoints_only(
    parent: WarmParent, whole: Path, tmp_path: Path
) -> None:
    process = parent.start(train_and_signal_in_save, tmp_path, log=tmp_path / "log.txt")
    assert process.wait() == 0, process.output
    assert read_end(process.output)["status"] == "preempted"
    for checkpoint in newest_run(tmp_path).glob("checkpoints/[!.]*/"):
        hookline.checkpoint.load_checkpoint(checkpoint)
    assert list(newest_run(tmp_path).rglob(".tmp-*")) == []
    check_resumed(parent, whole, tmp_path)


def test_a_second_signal_ends_the_process_at_once(
    parent: WarmParent, whole: Path, tmp_path: Path
) -> None:
    process = parent.start(
        train_and_signal, tmp_path, "on_step_end", "SIGTERM", 7, 2, log=tmp_path / "log.txt"
    )
    assert process.wait() in (-signal.SIGTERM, 128 + signal.SIGTERM), process.output
    assert '"status"' not in process.output  # fit did not return
    check_resumed(parent, whole, tmp_path)


# -- the command line ------------------------------------------------------------------------------

PROJECT = """
import os, signal, torch
from pathlib import Path
from torch import nn
import hookline

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
    def forward(self, x):
        return self.layers(x)

def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(2, 8, generator=generator), torch.ones(2, 4)) for _ in range(6)]

class Signal(hookline.Hook):
    def on_step_end(self, step):
        name = Path("signal.txt")
        if step == 4 and name.exists():
            number = getattr(signal, name.read_text())
            name.unlink()
            os.kill(os.getpid(), number)
"""

TRAINING = """\
seed: 0
model: {class_path: signalled.Net}
data: {train: signalled.batches}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer: {max_epochs: 2, progress: "off"}
hooks: [signalled.Signal]
"""


def run_cli(folder: str, *arguments: str) -> None:
    """Run `hookline` in a folder."""
    os.chdir(folder)
    sys.path.insert(0, "")
    sys.argv = ["hookline", *arguments]
    runpy.run_module("hookline", run_name="__main__", alter_sys=True)


def start_cli(parent: WarmParent, folder: Path, *arguments: str, log: str = "log.txt") -> Any:
    return parent.start(run_cli, folder, *arguments, log=folder / log)


@pytest.mark.soak(every=2)
@pytest.mark.parametrize(
    ("name", "code", "status"),
    [("SIGTERM", 143, "preempted"), ("SIGUSR1", 138, "preempted"), ("SIGINT", 130, "interrupted")],
)
def test_the_command_line_says_how_to_resume_and_does_it(
    parent: WarmParent, tmp_path: Path, name: str, code: int, status: str
) -> None:
    for folder in (tmp_path / "whole", tmp_path / "signalled"):
        folder.mkdir()
        (folder / "signalled.py").write_text(PROJECT)
        (folder / "train.yaml").write_text(TRAINING)
    folder = tmp_path / "signalled"
    (folder / "signal.txt").write_text(name)
    process = start_cli(parent, folder, "train", "train.yaml")
    assert process.wait() == code, process.output
    (path,) = (folder / "runs").iterdir()
    run = hookline.open_run(path)
    assert run.status == status
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [4]
    assert name in process.output if status == "preempted" else True
    assert "Traceback" not in process.output
    command = "hookline train train.yaml --resume"
    assert command in process.output

    again = start_cli(parent, folder, *command.split()[1:], log="again.txt")
    assert again.wait() == 0, again.output
    assert f"Resuming the run {path.name} ({status})" in again.output
    other = start_cli(parent, tmp_path / "whole", "train", "train.yaml")
    assert other.wait() == 0, other.output
    (alone,) = (tmp_path / "whole" / "runs").iterdir()
    rows = [[{**row, "time": 0} for row in hookline.open_run(p).metrics()] for p in (path, alone)]
    assert rows[0] == rows[1]
