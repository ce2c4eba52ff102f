"""A variational autoencoder whose KL term is added as a Python number: it has no gradient."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
BETA, STEPS = 0.5, 60


class VAE(nn.Module):
    def __init__(self, inputs=20, hidden=48, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, inputs)
        )

    def forward(self, x):
        hidden = self.encoder(x)
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


def losses(model, x):
    recon, mu, logvar = model(x)
    mse = F.mse_loss(recon, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return {"mse": mse, "kl": kl if FIXED else kl.item()}


def main():
    torch.manual_seed(0)
    mix = torch.randn(4, 20)
    data = torch.tanh(torch.randn(1024, 4) @ mix) + 0.05 * torch.randn(1024, 20)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        x = data[torch.randint(len(data), (128,))]
        parts = losses(model, x)
        loss = parts["mse"] + BETA * parts["kl"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.3f}")
    with torch.no_grad():
        _, mu, logvar = model(data)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    print(f"evidence: final KL {kl.item():.3f} nats")


if __name__ == "__main__":
    main()
