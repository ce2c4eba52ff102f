"""A spike is recorded once, also if training was killed and resumed around it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline

OUTLIER, SPIKE = 100, 26  # the sample, and the step that uses it
AFTER = 4  # steps from a spike to its event


class KillWhenSaved(hookline.Hook):
    """Kills its process after a step, as soon as there is a checkpoint."""

    saved = False

    def __init__(self, step: int) -> None:
        self.step = step

    def on_checkpoint_save(self) -> None:
        self.saved = True

    def on_step_end(self, step: int) -> None:
        if self.saved and step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, outlier: float, save_at: int, *hooks: Any, resume_from: Any = None) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=generator)
    y = torch.randn(400, 4, generator=generator)
    y[OUTLIER] = outlier
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    detector = hookline.LossSpikeDetector(window=16, min_steps=4, steps_before=3, steps_after=AFTER)
    trainer = loops.make_trainer(
        detector,
        hookline.ModelCheckpoint(every_n_steps=save_at),
        *hooks,
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-5),
        runs=folder,
        max_steps=max(42, save_at + 10),
        on_nan="skip",
        checkpoints={"background": False},
    )
    return trainer.fit(DataLoader(TensorDataset(x, y), batch_size=4), resume_from=resume_from)


@pytest.mark.parametrize(
    ("save_at", "kill_at", "outlier"),
    [
        pytest.param(SPIKE, SPIKE, 1000.0, id="before its loss was read", marks=pytest.mark.soak),
        pytest.param(SPIKE + 1, SPIKE + 1, math.inf, id="before its event"),
        pytest.param(
            SPIKE + 1, SPIKE + AFTER + 3, 1000.0, id="after its event", marks=pytest.mark.soak
        ),
    ],
)
def test_a_spike_is_recorded_once(tmp_path, save_at, kill_at, outlier) -> None:
    arguments = [str(tmp_path), str(outlier), str(save_at), str(kill_at)]
    killed = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (folder,) = tmp_path.iterdir()
    assert len(spikes_in(folder)) == (kill_at > SPIKE + AFTER)
    trainer = train(tmp_path, outlier, save_at, resume_from=folder)
    assert trainer.run.path == folder
    (spike,) = spikes_in(folder)
    first = SPIKE if math.isfinite(outlier) else SPIKE - 1  # a skipped step does not count
    assert spike["step"] == first
    assert spike["batches"][0]["indices"] == list(range(OUTLIER, OUTLIER + 4))
    steps = {step for step, _ in spike["values"]["train/loss"]}
    assert steps == set(range(first - 3, first + AFTER + 1))


def spikes_in(folder: Path) -> list[dict[str, Any]]:
    return [one for one in hookline.open_run(folder).events() if one["kind"] == "loss_spike"]


if __name__ == "__main__":
    own_folder, own_outlier, own_save, own_kill = sys.argv[1:]
    train(Path(own_folder), float(own_outlier), int(own_save), KillWhenSaved(int(own_kill)))
