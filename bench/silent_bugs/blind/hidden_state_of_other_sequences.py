"""GRU over independent sequences in random order."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv


class SumModel(nn.Module):
    """Running sum of noisy inputs. Keeps its state, detached, for truncated backpropagation."""

    def __init__(self, width=32):
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True)
        self.output = nn.Linear(width, 1)
        self.state = None

    def reset(self):
        self.state = None

    def forward(self, x):
        h, state = self.gru(x.unsqueeze(-1), self.state)
        self.state = state.detach()
        return self.output(h).squeeze(-1)


def main():
    torch.manual_seed(0)
    x = 0.5 * torch.randn(512, 16)
    y = x.cumsum(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)
    model = SumModel()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    for epoch in range(6):
        model.reset()
        for xb, yb in loader:
            if FIXED:
                model.reset()
            loss = nn.functional.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    with torch.no_grad():
        model.reset()
        first = model(x[:32])
        if FIXED:
            model.reset()
        second = model(x[:32])
        gap = (first - second).abs().max().item()
    print(f"evidence: the same batch twice in a row, outputs differ by {gap:.4f}")


if __name__ == "__main__":
    main()
