"""The files that a save passes, from ModelCheckpoint's decision to the durable checkpoint.

Traced in a real run, and compared with the call path in CONTRIBUTING.md: at most twelve files pass
the save on. Functions of about twenty others run, too. They are listed by hand in `LEAVES`, because
they are asked for one value or do one chore, and return; a few of them call each other.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline.checkpoint.saver import CheckpointWriter
from hookline.hooks.checkpointing.model_checkpoint import ModelCheckpoint
from hookline.integrations.bare_loop.session_saves import SessionSaves
from hookline.loop.checkpoints import Checkpoints
from hookline.trainer.trainer import Trainer

SOURCE = Path(hookline.__file__).parent
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"

PARTS = {  # of a save; in between, training goes on
    function.__code__
    for function in (
        *(ModelCheckpoint._save, Trainer._save_requested, CheckpointWriter.write),
        *(SessionSaves.event_ended, SessionSaves.save_requested),
    )
}
REPORT = Checkpoints.report.__code__  # of an earlier save
LEAVES = {
    *("arguments.py", "context.py", "files.py", "interrupts.py", "tensors/sharded.py"),
    *("loop/loop.py", "loop/processes.py", "loop/event_context.py"),  # read what they have
    *("loop/phase_times.py", "tensors/timing.py"),  # time the save
    *("runs/run.py", "runs/jsonl_file.py", "runs/jsonable.py", "runs/lease.py"),  # flush the log
    # The states of single objects, which a checkpoint has:
    *("dispatch/manager.py", "dispatch/entry.py", "loop/means.py", "loop/random_state.py"),
    *("trainer/strategies/single_process.py", "trainer/data_stream.py"),
    *("loop/record.py", "loop/rank_sync.py"),
    # Whether a hook calls, and whether gradients wait for their optimizer:
    *("dispatch/calling_hook.py", "integrations/bare_loop/step_watch.py"),
    # The hook that waits for the next call of a bare loop's model:
    *("loop/model_watch.py", "tensors/hidden_hooks.py"),
}
WALKS = {
    "trainer": {"trainer/trainer.py", "trainer/position.py", "trainer/loader_passes.py"},
    "bare loop": {
        f"integrations/bare_loop/{name}.py" for name in ("session", "session_saves", "loop_phases")
    },
}
WALK = {
    *("hooks/checkpointing/model_checkpoint.py", "checkpoint/retention.py"),
    *("loop/control_requests.py", "loop/checkpoints.py", "loop/state.py"),
    *("checkpoint/saver.py", "checkpoint/snapshot.py"),
    *("checkpoint/atomic_files.py", "checkpoint/catalog.py"),
}


class Trace:
    """Collects the files whose functions run within `PARTS`, in all threads."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._local = threading.local()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or code.co_name in ("<module>", "__del__"):
            return
        depth, muted = getattr(self._local, "depth", 0), getattr(self._local, "muted", 0)
        change = 1 if event == "call" else -1
        self._local.depth = depth = depth + change * (code in PARTS)
        self._local.muted = muted = muted + change * (code is REPORT)
        path = Path(code.co_filename)
        if depth and not muted and event == "call" and path.is_relative_to(SOURCE):
            self.files.add(path.relative_to(SOURCE).as_posix())


@contextmanager
def traced() -> Generator[Trace]:
    trace, before = Trace(), sys.getprofile()
    gc.disable()  # what it would free is not part of the save
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        gc.enable()


def files_of_saves(loop: str, runs: Path) -> set[str]:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
    hooks = [ModelCheckpoint(every=2, save_top_k=2)]
    with traced() as trace:
        if loop == "trainer":
            config = {"max_epochs": 1, "runs": runs, "progress": "off"}
            Trainer(config, model, optimizer, loss_fn=F.mse_loss, hooks=hooks).fit(data)
        else:
            with hookline.attach(model, optimizer, hooks=hooks, runs=runs):
                for inputs, targets in data:
                    F.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    assert len(list(runs.glob("*/checkpoints/*/manifest.json"))) == 2
    return trace.files


@pytest.mark.parametrize("loop", WALKS)
def test_at_most_twelve_files_pass_a_save_on(loop: str, tmp_path: Path) -> None:
    walk = files_of_saves(loop, tmp_path) - LEAVES
    assert walk == WALK | WALKS[loop]
    assert len(walk) <= 12


def test_contributing_names_all_files_that_a_save_passes() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8").split("### Saving and resuming")[1]
    walk = WALK.union(*WALKS.values())
    assert [file for file in sorted(walk) if f"`{file}" not in text.split("\n## ")[0]] == []
