"""The Lookahead optimizer by hand: every five steps the weights are pulled half-way back."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY, ALPHA, EPOCHS = 5, 0.5, 4


class Lookahead:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.slow = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
        self.count = 0

    def zero_grad(self):
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % EVERY == 0:
            fast = [p for g in self.optimizer.param_groups for p in g["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                slow.lerp_(p, ALPHA)
                p.copy_(slow)


def main():
    torch.manual_seed(0)
    x = torch.randn(800, 10)
    y = (x[:, 0] * x[:, 1] + x[:, 2].sin())[:, None] + 0.1 * torch.randn(800, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for epoch in range(EPOCHS):
        total = 0.0
        for xb, yb in loader:
            loss = F.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
