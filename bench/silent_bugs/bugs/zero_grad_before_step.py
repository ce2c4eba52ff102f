"""Variational autoencoder on synthetic digits."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIDE, LATENT = 10, 4


class VAE(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.enc = nn.Linear(SIDE * SIDE, hidden)
        self.mean = nn.Linear(hidden, LATENT)
        self.logvar = nn.Linear(hidden, LATENT)
        self.dec = nn.Sequential(
            nn.Linear(LATENT, hidden), nn.ReLU(), nn.Linear(hidden, SIDE * SIDE)
        )

    def forward(self, x):
        h = F.relu(self.enc(x))
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return self.dec(z), mean, logvar


def elbo(logits, x, mean, logvar):
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    divergence = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum() / len(x)
    return reconstruction + divergence


def bars(count):
    image = torch.zeros(count, SIDE, SIDE)
    for k in range(count):
        row, col = torch.randint(0, SIDE, (2,)).tolist()
        image[k, row, :] = 1.0
        image[k, :, col] = 1.0
    return image.flatten(1)


def train_one_epoch(model, loader, optimizer, fixed):
    model.train()
    total = 0.0
    for (x,) in loader:
        if fixed:
            optimizer.zero_grad()
        logits, mean, logvar = model(x)
        loss = elbo(logits, x, mean, logvar)
        loss.backward()
        if not fixed:
            optimizer.zero_grad()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    torch.manual_seed(63)

    loader = DataLoader(TensorDataset(bars(500)), batch_size=50, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    before = [p.detach().clone() for p in model.parameters()]
    for epoch in range(1, args.epochs + 1):
        loss = train_one_epoch(model, loader, optimizer, args.fixed)
        print(f"epoch {epoch} loss {loss:.3f}")

    pairs = zip(before, model.parameters(), strict=True)
    change = max((a - b.detach()).abs().max().item() for a, b in pairs)
    print(f"evidence: largest change of a weight {change:.6f}")


if __name__ == "__main__":
    main()
