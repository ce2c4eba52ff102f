"""Gradient accumulation over four micro-batches of equal size, the loss divided by four."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    micro_batch: int = 16
    accumulate: int = 4
    epochs: int = 5
    lr: float = 4e-3


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 16, 7, stride=2), nn.ReLU(), nn.Conv1d(16, 32, 5, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.features(x).mean(-1))


def waves(n):
    t = torch.linspace(0, 6.28, 64)
    kind = torch.randint(0, 3, (n,))
    phase = torch.rand(n, 1) * 6.28
    frequency = torch.tensor([2.0, 5.0, 9.0])[kind][:, None]
    return TensorDataset(
        (torch.sin(frequency * t + phase) + 0.5 * torch.randn(n, 64))[:, None], kind
    )


def validate(model, loader):
    model.eval()
    total, right = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            logits = model(x)
            total += F.cross_entropy(logits, y, reduction="sum").item()
            right += (logits.argmax(1) == y).sum().item()
    model.train()
    n = len(loader.dataset)
    return total / n, right / n


def main():
    torch.manual_seed(0)
    cfg = Config()
    train = DataLoader(waves(1024), batch_size=cfg.micro_batch, shuffle=True, drop_last=True)
    val = DataLoader(waves(300), batch_size=100)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    optimizer.zero_grad()
    updates = 0
    for epoch in range(cfg.epochs):
        running = 0.0
        for number, (x, y) in enumerate(train, start=1):
            loss = F.cross_entropy(model(x), y) / cfg.accumulate
            loss.backward()
            running += loss.item()
            if number % cfg.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
                if updates % 8 == 0:
                    print(f"update {updates}: loss {running:.3f}")
                running = 0.0
        val_loss, accuracy = validate(model, val)
        print(f"epoch {epoch}: val loss {val_loss:.3f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
