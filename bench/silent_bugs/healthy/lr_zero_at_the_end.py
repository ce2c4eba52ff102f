"""Linear decay to 0 over the planned steps; clipping by value; the last updates are tiny."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Config:
    steps: int = 90
    warmup: int = 9
    lr: float = 5e-3
    clip_value: float = 0.05


class Highway(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.change, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        return gate * F.relu(self.change(x)) + (1 - gate) * x


def build():
    return nn.Sequential(nn.Linear(9, 32), *(Highway(32) for _ in range(3)), nn.Linear(32, 2))


def board(n):
    """Noughts and crosses: who holds more of the diagonals and the centre?"""
    x = torch.randint(-1, 2, (n, 9)).float()
    score = x[:, [0, 2, 6, 8]].sum(1) + 2 * x[:, 4] + 0.5
    return x, (score > 0).long()


def main():
    torch.manual_seed(0)
    cfg = Config()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    def rate(step):
        if step < cfg.warmup:
            return (step + 1) / cfg.warmup
        return max(0.0, (cfg.steps - 1 - step) / (cfg.steps - 1 - cfg.warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(cfg.steps):
        x, y = board(80)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), cfg.clip_value)
        optimizer.step()
        if step % 10 == 0 or step == cfg.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, lr {optimizer.param_groups[0]['lr']:.6f}")
        schedule.step()
    x, y = board(1000)
    with torch.no_grad():
        print(f"accuracy {(model.eval()(x).argmax(1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
