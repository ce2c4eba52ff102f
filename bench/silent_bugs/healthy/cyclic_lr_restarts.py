"""Cosine annealing with warm restarts to lr 0, a snapshot of the weights per cycle, an ensemble."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

CYCLE, CYCLES = 25, 4


def batch(weights, n=64):
    x = torch.randn(n, 12)
    return x, torch.sign(torch.tanh(x @ weights[0]) @ weights[1])


def main():
    torch.manual_seed(0)
    weights = torch.randn(12, 8), torch.randn(8, 1)
    model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model.append(nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=CYCLE)
    snapshots = []
    for step in range(1, CYCLE * CYCLES + 1):
        x, y = batch(weights)
        loss = F.soft_margin_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % CYCLE == 0:
            snapshots.append(copy.deepcopy(model).eval().requires_grad_(False))
        if step % 5 == 0:
            rate = optimizer.param_groups[0]["lr"]
            print(f"step {step}: loss {loss.item():.3f}, lr {rate:.4f}")
        schedule.step()
    x, y = batch(weights, 1000)
    votes = torch.stack([snapshot(x) for snapshot in snapshots])
    singles = [(v.sign() == y).float().mean().item() for v in votes]
    together = (votes.mean(0).sign() == y).float().mean().item()
    print(f"snapshots {[round(s, 3) for s in singles]}, together {together:.3f}")


if __name__ == "__main__":
    main()
