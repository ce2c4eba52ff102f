"""A forecaster whose projection size depends on the input, trained on sums of sines."""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


class Forecaster(nn.Module):
    def __init__(self, channels=16, window=32, horizon=4):
        super().__init__()
        self.horizon = horizon
        self.conv = nn.Sequential(
            nn.Conv1d(1, channels, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 3),
            nn.ReLU(),
        )
        if FIXED:
            self.flat = nn.Linear(channels * (window - 2), 24)
        self.out = nn.Linear(24, horizon)

    def forward(self, x):
        h = self.conv(x[:, None]).flatten(1)
        flat = self.flat if FIXED else nn.Linear(h.shape[1], 24)
        return self.out(torch.tanh(flat(h)))


def series(batch, length, generator):
    phase = 6.3 * torch.rand(batch, 1, generator=generator)
    speed = 0.2 + 0.3 * torch.rand(batch, 1, generator=generator)
    t = torch.arange(length)
    return torch.sin(phase + speed * t)


def main():
    torch.manual_seed(0)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.SmoothL1Loss()
    generator = torch.Generator().manual_seed(7)
    for step in range(1, 101):
        x = series(32, 36, generator)
        loss = criterion(model(x[:, :32]), x[:, 32:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        x = series(64, 36, generator)
        gap = (model(x[:, :32]) - model(x[:, :32])).abs().max().item()
    print(f"evidence: two evaluations of the same input differ by {gap:.4f}")


if __name__ == "__main__":
    main()
