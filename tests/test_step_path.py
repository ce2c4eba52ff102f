"""The files that a step passes, from one `on_step_end` to the next, in a bare loop and the trainer.

Traced in a real run, and compared with the call paths in CONTRIBUTING.md. A file passes the step on
if one of its functions is on the stack when hooks are called or a value is recorded: at most ten do
so. The others are leaves. Each is asked for one value or does one chore, and returns: nothing that
they call leads to a hook or to the record, and none of them calls back into a file that passes the
step on. Clocks, which are read in some of the steps only, are left out.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from traced_calls import CallTrace, files_in_contributing, traced

import hookline
from hookline.context import LazyFloat
from hookline.dispatch import accounting
from hookline.dispatch.dispatcher import Dispatcher
from hookline.runs.jsonl_file import MetricsLog
from hookline.trainer.trainer import Trainer

STEP = 3  # the first steps also check hooks, compile dispatchers and learn about the loop
CLOCKS = {"loop/phase_times.py", "tensors/timing.py"}
HOOK_CLOCKS = {Dispatcher._next_gap.__code__, Dispatcher._add_time.__code__}

BOTH = {
    *("loop/model_watch.py", "loop/loop.py", "dispatch/compiler.py"),
    *("runs/run.py", "runs/jsonl_file.py"),
}
WALKS = {
    "A step of the trainer": BOTH | {"trainer/trainer.py", "trainer/losses.py"},
    "A step of a bare loop": BOTH
    | {"integrations/bare_loop/step_watch.py", "integrations/bare_loop/patched_calls.py"}
    | {"loop/record.py"},
}
BEFORE = {  # files in CONTRIBUTING.md that begin training
    "A step of the trainer": set[str](),
    "A step of a bare loop": {"integrations/attach.py", "integrations/bare_loop/session.py"},
}
LEAVES = {  # what hooks and the record are given
    *("context.py", "dispatch/binding.py", "loop/event_context.py"),
    *("tensors/norms.py", "loop/evaluation.py"),
}
LEAVES_OF = {
    "A step of the trainer": LEAVES
    | {"loop/record.py", "trainer/loader_passes.py"}  # takes samples of the system; the next batch
    | {"trainer/strategies/single_process.py", "updates/stateless.py"},
    "A step of a bare loop": LEAVES
    | {f"integrations/bare_loop/{name}.py" for name in ("data_watch", "loop_phases")}  # the batch
    | {"integrations/bare_loop/step_losses.py", "loop/means.py"}
    | {"loop/patches.py"},  # who watches backward
}


class Watch(hookline.Hook):
    """Traces a step, from its beginning to its last event."""

    def __init__(self, trace: CallTrace) -> None:
        self._trace = trace

    def on_before_forward(self, step: int) -> None:
        """Ask for the forward to be watched."""

    def on_after_backward(self, step: int) -> None:
        """Ask for backward to be watched."""

    def on_step_end(self, step: int, loss: float, grad_norm: float, lr: LazyFloat) -> None:
        """Ask for what most hooks ask for."""
        if step == STEP - 1:
            self._trace.start()
        elif step == STEP:
            self._trace.stop()


@cache
def trace_step(loop: str) -> CallTrace:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
    trace = CallTrace(muted=HOOK_CLOCKS, ends=[MetricsLog.add.__code__])
    with TemporaryDirectory() as runs, pytest.MonkeyPatch.context() as patch, traced(trace):
        patch.setattr(accounting, "SLOW_NS", 10**12)  # tracing makes hooks slow
        patch.setenv("HOOKLINE_SAMPLE_SECONDS", "0")  # a step in which a sample is recorded differs
        if loop == "A step of the trainer":
            config = {"max_epochs": 1, "runs": runs, "progress": "off"}
            Trainer(config, model, optimizer, loss_fn=F.mse_loss, hooks=[Watch(trace)]).fit(data)
        else:
            with hookline.attach(model, optimizer, hooks=[Watch(trace)], runs=Path(runs)):
                for inputs, targets in data:
                    F.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    return trace


@pytest.mark.parametrize("loop", WALKS)
def test_at_most_ten_files_pass_a_step_on(loop: str) -> None:
    trace = trace_step(loop)
    assert trace.ways == WALKS[loop]
    assert len(trace.ways) <= 10


@pytest.mark.parametrize("loop", WALKS)
def test_all_other_files_of_a_step_return_without_calling_back(loop: str) -> None:
    trace = trace_step(loop)
    leaves = trace.files - trace.ways - CLOCKS
    assert leaves == LEAVES_OF[loop]
    assert trace.calls_back(leaves, trace.ways) == set()


@pytest.mark.parametrize("loop", WALKS)
def test_contributing_names_the_files_that_a_step_passes(loop: str) -> None:
    assert files_in_contributing(loop) == WALKS[loop] | BEFORE[loop]
