"""Mixture of experts with a bias per expert that balances the load without a loss term."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
EXPERTS, WIDTH = 6, 24


class Router(nn.Module):
    def __init__(self, speed=0.02):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.speed = speed
        self.register_buffer("balance", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x))
        chosen = (scores + self.balance).argmax(-1)
        if self.training:
            self.load += torch.bincount(chosen, minlength=EXPERTS)
        return chosen, scores.gather(1, chosen[:, None])

    @torch.no_grad()
    def update_balance(self):
        error = self.load.mean() - self.load
        if not FIXED:
            error = self.load - self.load.mean()
        self.balance += self.speed * error / self.load.mean()
        share = (self.load / self.load.sum()).tolist()
        self.load.zero_()
        return share


class MixtureLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = Router()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        y = self.norm(x)
        chosen, weight = self.router(y)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, weight[rows] * expert(y[rows]))
        return x + out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.mixture = MixtureLayer()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.mixture(self.stem(x)))


def sample(generator, maps, size=96):
    kind = torch.randint(0, EXPERTS, (size,), generator=generator)
    x = torch.randn(size, 8, generator=generator)
    target = torch.einsum("bi,bij->bj", x, maps[kind])
    x[:, :2] += torch.stack([(kind % 3) * 2.0 - 2, (kind // 3) * 2.0 - 1], 1)
    return x, target


def main():
    torch.manual_seed(25)
    generator = torch.Generator().manual_seed(26)
    maps = torch.randn(EXPERTS, 8, 4, generator=generator) / 3
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(1, 101):
        x, target = sample(generator, maps)
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        share = model.mixture.router.update_balance()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    used = sum(s > 0.01 for s in share)
    print(f"evidence: {used} of {EXPERTS} experts in use, the busiest has {max(share):.3f}")


if __name__ == "__main__":
    main()
