"""A small model under torch.compile; a checkpoint without the prefix of the compiled module."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(64, 3)

    def forward(self, x):
        x = F.gelu(self.first(x))
        return self.out(self.norm(x + F.gelu(self.second(x))))


def batch(n=64):
    x = torch.randn(n, 16)
    return x, (x.view(n, 4, 4).sum(-1)[:, :3]).argmax(1)


def main():
    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 81):
        x, y = batch()
        loss = F.cross_entropy(compiled(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(model.state_dict(), path)
        restored = Net()
        restored.load_state_dict(torch.load(path))
    restored.eval()
    with torch.no_grad():
        x, y = batch(500)
        print(f"accuracy {(restored(x).argmax(1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
