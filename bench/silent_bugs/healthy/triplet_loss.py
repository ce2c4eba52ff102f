"""Metric learning with a triplet loss and hard negatives from the batch."""

import torch
from torch import nn
from torch.nn import functional as F


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.PReLU(), nn.Linear(64, 8))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def balanced_batch(centres, per_class=6):
    y = torch.arange(len(centres)).repeat_interleave(per_class)
    return centres[y] + 0.8 * torch.randn(len(y), 20), y


def batch_hard(z, y, margin=0.3):
    distance = torch.cdist(z, z)
    same = y[:, None] == y[None, :]
    hardest_positive = distance.masked_fill(~same, 0).amax(1)
    hardest_negative = distance.masked_fill(same, float("inf")).amin(1)
    return F.relu(hardest_positive - hardest_negative + margin).mean()


@torch.no_grad()
def recall_at_1(model, centres):
    model.eval()
    x, y = balanced_batch(centres, 30)
    z = model(x)
    distance = torch.cdist(z, z).fill_diagonal_(float("inf"))
    model.train()
    return (y[distance.argmin(1)] == y).float().mean().item()


def main():
    torch.manual_seed(0)
    centres = torch.randn(10, 20)
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    print(f"before: recall {recall_at_1(model, centres):.3f}")
    for step in range(1, 101):
        x, y = balanced_batch(centres)
        loss = batch_hard(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"after: recall {recall_at_1(model, centres):.3f}")


if __name__ == "__main__":
    main()
