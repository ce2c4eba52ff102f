"""Gradient accumulation over an epoch whose length is no multiple of the accumulation."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
ACCUMULATE, EPOCHS = 4, 10


class Autoencoder(nn.Module):
    def __init__(self, inputs=36, code=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, 48), nn.ReLU(), nn.Linear(48, code))
        self.decoder = nn.Sequential(nn.Linear(code, 48), nn.ReLU(), nn.Linear(48, inputs))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def train_epoch(model, loader, optimizer, counts):
    model.train()
    total = 0.0
    if FIXED:
        optimizer.zero_grad()
    for i, (x,) in enumerate(loader):
        loss = F.mse_loss(model(x), x) / ACCUMULATE
        loss.backward()
        counts["pending"] = counts["pending"] + 1 if i or not FIXED else 1
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            counts["most"] = max(counts["most"], counts["pending"])
            counts["pending"] = 0
            counts["steps"] += 1
        total += loss.item() * ACCUMULATE
    return total / len(loader)


def main():
    torch.manual_seed(0)
    basis = torch.randn(6, 36)
    data = torch.randn(27 * 16, 6) @ basis / 3
    loader = DataLoader(TensorDataset(data), batch_size=16, shuffle=True)
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counts = {"pending": 0, "most": 0, "steps": 0}
    for epoch in range(EPOCHS):
        mean = train_epoch(model, loader, optimizer, counts)
        print(f"epoch {epoch} steps {counts['steps']} loss {mean:.4f}")
    print(f"evidence: most micro-batches in one step {counts['most']}, wanted {ACCUMULATE}")


if __name__ == "__main__":
    main()
