"""Distributional value learning: every quantile against every target sample, by broadcasting."""

import torch
from torch import nn

QUANTILES = 11


class QuantileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.head = nn.Linear(48, QUANTILES)

    def forward(self, x):
        return self.head(self.body(x))


def quantile_huber(prediction, samples, levels):
    """prediction (N, Q), samples (N, S): all pairs (N, S, Q)."""
    error = samples[:, :, None] - prediction[:, None, :]
    huber = torch.where(error.abs() < 0.1, error.pow(2) / 0.2, error.abs() - 0.05)
    weight = (levels - (error.detach() < 0).float()).abs()
    return (weight * huber).sum(-1).mean()


def returns(state, samples):
    spread = 0.2 + state[:, 1:2].abs()
    return state[:, :1] + spread * torch.randn(len(state), samples)


def main():
    torch.manual_seed(0)
    levels = (torch.arange(QUANTILES) + 0.5) / QUANTILES
    model = QuantileNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(1, 121):
        state = torch.randn(96, 3)
        loss = quantile_huber(model(state), returns(state, 8), levels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        state = torch.randn(400, 3)
        below = returns(state, 200)[:, :, None] < model(state)[:, None, :]
    coverage = below.float().mean((0, 1))
    print(f"largest error of coverage {(coverage - levels).abs().max():.3f}")


if __name__ == "__main__":
    main()
