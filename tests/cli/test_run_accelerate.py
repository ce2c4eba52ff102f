"""`hookline run` with `accelerate launch`, in two processes on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from accelerate_launch import LAUNCH, TWO
from commands import ENVIRONMENT

from hookline.runs import open_run

pytest.importorskip("accelerate", reason="Accelerate is not installed.")

SCRIPT = """
import torch
from accelerate import Accelerator
from torch.nn import functional as F

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(data, batch_size=4)
)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(mean.item(), norm.item(), accelerator.num_processes)
"""


def test_accelerate_launch_writes_one_run_of_both_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hooks.yaml").write_text(
        "hooks:\n  - {name: gradient_monitor, log_frequency: 1}\n  - lr_monitor\n"
    )
    launch = [sys.executable, *LAUNCH, "--mixed_precision", "no", *TWO, "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "hookline", "run", "--hooks", "hooks.yaml", "--", *launch],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert [processes for _, _, processes in printed] == [2] * 4
    [folder] = (tmp_path / "runs").iterdir()
    run = open_run(folder)
    assert run.manifest["status"] == "completed"
    for column, name in enumerate(("train/loss", "gradients/total/norm")):
        values = [row["value"] for row in run.metrics(name)]
        assert values == pytest.approx([line[column] for line in printed], rel=1e-5), name
    assert [row["value"] for row in run.metrics("lr/SGD")] == [0.1] * 4
