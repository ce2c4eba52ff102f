"""Variational autoencoder, stopped and continued from a checkpoint."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
STEPS, SAVE_AT = 100, 60


class VAE(nn.Module):
    def __init__(self, size=36, hidden=64, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, latent)
        self.log_variance = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, size))

    def forward(self, x):
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


def loss_function(x, output, mean, log_variance):
    reconstruction = F.binary_cross_entropy_with_logits(output, x, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (reconstruction + divergence) / len(x)


def get_batch(step, size=32):
    """Pictures with one bright rectangle."""
    generator = torch.Generator().manual_seed(step)
    corner = torch.randint(0, 4, (size, 2), generator=generator)
    grid = torch.arange(6)
    rows = (grid >= corner[:, :1]) & (grid < corner[:, :1] + 3)
    columns = (grid >= corner[:, 1:]) & (grid < corner[:, 1:] + 3)
    return (rows[:, :, None] & columns[:, None, :]).float().flatten(1)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)


def save_checkpoint(path, model, optimizer, step):
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path
    )


def load_checkpoint(path, model, optimizer):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def train(model, optimizer, start, stop):
    for step in range(start + 1, stop + 1):
        x = get_batch(step)
        loss = loss_function(x, *model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")


def resume(path):
    model = VAE()
    optimizer = build_optimizer(model)
    step = load_checkpoint(path, model, optimizer)
    if not FIXED:
        optimizer = build_optimizer(model)
    return model, optimizer, step


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        model = VAE()
        optimizer = build_optimizer(model)
        train(model, optimizer, 0, SAVE_AT)
        save_checkpoint(path, model, optimizer, SAVE_AT)
        model, optimizer, step = resume(path)
    print(f"resumed after step {step}")
    train(model, optimizer, step, STEPS)
    counted = int(optimizer.state[model.mean.weight]["step"])
    print(f"evidence: AdamW counts {counted} steps after {STEPS} steps")


if __name__ == "__main__":
    main()
