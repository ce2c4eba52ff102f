"""The files that a save passes, from ModelCheckpoint's decision to the durable checkpoint.

Traced in a real run, and compared with the call path in CONTRIBUTING.md: at most twelve files pass
the save on. Functions of about twenty others run, too. They are listed by hand in `LEAVES`, because
they are asked for one value or do one chore, and return. A few of them call each other; but none
calls back into a file that passes the save on, apart from `CALLED_BACK`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from traced_calls import CallTrace, files_in_contributing, traced

import hookline
from hookline.checkpoint.saver import CheckpointWriter
from hookline.hooks.checkpointing.model_checkpoint import ModelCheckpoint
from hookline.integrations.bare_loop.session_saves import SessionSaves
from hookline.loop.checkpoints import Checkpoints
from hookline.trainer.trainer import Trainer

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
    *("runs/run.py", "runs/jsonl_file.py", "runs/jsonable.py", "runs/lock.py"),  # flush the log
    # The states of single objects, which a checkpoint has:
    *("dispatch/manager.py", "dispatch/entry.py", "loop/means.py", "loop/random_state.py"),
    *("trainer/strategies/single_process.py", "trainer/data_stream.py"),
    *("loop/record.py", "loop/rank_sync.py"),
    # Whether a hook calls, and whether gradients wait for their optimizer:
    *("dispatch/calling_hook.py", "integrations/bare_loop/step_watch.py"),
    # The hook that waits for the next call of a bare loop's model:
    *("loop/model_watch.py", "tensors/hidden_hooks.py"),
}
CALLED_BACK = {
    # Each hook, ModelCheckpoint too, is asked for its state.
    ("dispatch/manager.py", "hooks/checkpointing/model_checkpoint.py"),
    # `Checkpoints.with_folders` gives its own last lines to rank 0.
    ("loop/processes.py", "loop/checkpoints.py"),
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


def trace_saves(loop: str, runs: Path) -> CallTrace:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
    hooks = [ModelCheckpoint(every=2, save_top_k=2)]
    with traced(CallTrace(parts=PARTS, muted=[REPORT])) as trace:
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
    return trace


@pytest.mark.parametrize("loop", WALKS)
def test_at_most_twelve_files_pass_a_save_on(loop: str, tmp_path: Path) -> None:
    trace = trace_saves(loop, tmp_path)
    walk = trace.files - LEAVES
    assert walk == WALK | WALKS[loop]
    assert len(walk) <= 12
    assert trace.calls_back(LEAVES, walk) <= CALLED_BACK


def test_contributing_names_all_files_that_a_save_passes() -> None:
    walk = WALK.union(*WALKS.values())
    assert walk - files_in_contributing("Saving and resuming") == set()
