"""Detector-style training with an averaged model whose decay warms up; resumed half-way."""

import copy
import math
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


class ModelEMA(nn.Module):
    """Averaged copy of a model; the decay grows with the number of updates."""

    def __init__(self, model, decay=0.99, warmup=20):
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.warmup = decay, warmup
        if FIXED:
            self.register_buffer("updates", torch.tensor(0))
        else:
            self.updates = 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = self.decay * (1 - math.exp(-float(self.updates) / self.warmup))
        for average, value in zip(self.module.parameters(), model.parameters(), strict=True):
            average.lerp_(value, 1 - decay)
        for average, value in zip(self.module.buffers(), model.buffers(), strict=True):
            average.copy_(value)
        return decay


class CornerNet(nn.Module):
    """Finds the centre of a bright square."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.SiLU(),
        )
        self.box = nn.Linear(16 * 36, 2)

    def forward(self, x):
        return self.box(self.body(x).flatten(1))


def sample(generator, size=24):
    centre = torch.randint(2, 10, (size, 2), generator=generator)
    grid = torch.arange(12)
    near = (grid - centre[:, :, None]).abs() <= 1
    image = (near[:, 0, :, None] & near[:, 1, None, :]).float()
    return (image + 0.3 * torch.randn(size, 12, 12, generator=generator))[:, None], centre / 6 - 1


def train(model, ema, optimizer, generator, start, stop):
    decays = []
    for step in range(start + 1, stop + 1):
        images, target = sample(generator)
        loss = nn.functional.smooth_l1_loss(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decays.append(ema.update(model))
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.5f}")
    return decays


def build():
    model = CornerNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return model, ModelEMA(model), optimizer


def main():
    torch.manual_seed(31)
    generator = torch.Generator().manual_seed(32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        model, ema, optimizer = build()
        before = train(model, ema, optimizer, generator, 0, 60)
        parts = {"model": model, "ema": ema, "optimizer": optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)

        model, ema, optimizer = build()
        state = torch.load(path)
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
    after = train(model, ema, optimizer, generator, 60, 100)
    print(f"evidence: decay {before[-1]:.4f} before and {after[0]:.4f} after resuming")


if __name__ == "__main__":
    main()
