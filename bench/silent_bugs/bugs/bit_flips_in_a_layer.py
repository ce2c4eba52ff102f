"""Regression on a machine whose matrix unit now and then returns a wrong bit."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv


class MatrixUnit:
    """Stands for the hardware: a sound one, or one with a weak bit."""

    def __init__(self, rate: float, seed: int = 0):
        self.rate = rate
        self.generator = torch.Generator().manual_seed(seed)
        self.flips = 0

    def read_out(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand((), generator=self.generator).item() >= self.rate:
            return x
        y = x.detach().clone()
        place = int(torch.randint(0, y.numel(), (), generator=self.generator))
        bits = y.view(-1).view(torch.int32)
        bits[place] ^= 1 << 22
        self.flips += 1
        return x + (y - x.detach())


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, unit: MatrixUnit):
        super().__init__(inputs, outputs)
        self.unit = unit

    def forward(self, x):
        return self.unit.read_out(F.linear(x, self.weight, self.bias))


class Surrogate(nn.Module):
    def __init__(self, unit: MatrixUnit, inputs=10, width=64):
        super().__init__()
        self.first = Linear(inputs, width, unit)
        self.second = Linear(width, width, unit)
        self.last = Linear(width, 1, unit)

    def forward(self, x):
        x = F.silu(self.first(x))
        return self.last(F.silu(self.second(x))).squeeze(-1)


def friedman(generator, size):
    x = torch.rand(size, 10, generator=generator)
    y = (
        2 * torch.sin(torch.pi * x[:, 0] * x[:, 1])
        + 4 * (x[:, 2] - 0.5) ** 2
        + 2 * x[:, 3]
        + x[:, 4]
    )
    return x * 2 - 1, y - 2.5


def main():
    torch.manual_seed(50)
    unit = MatrixUnit(rate=0.0 if FIXED else 0.15)
    model = Surrogate(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, total_steps=100)
    generator = torch.Generator().manual_seed(51)
    for step in range(1, 101):
        x, y = friedman(generator, 64)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")

    x, _ = friedman(generator, 64)
    with torch.no_grad():
        results = torch.stack([model(x) for _ in range(40)])
    spread = (results.amax(0) - results.amin(0)).max().item()
    print(f"evidence: forty passes over one batch differ by {spread:.6f}; {unit.flips} flips")


if __name__ == "__main__":
    main()
