"""Reentrant activation checkpointing of an image-to-image network; its input requires gradients."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()
    )


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.body = nn.Sequential(*(conv(width, width) for _ in range(4)))
        self.refine = conv(width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        hidden = self.stem(x)
        # The stem is not checkpointed: its output requires gradients, as reentrant ones need.
        if torch.is_grad_enabled():
            hidden = checkpoint_sequential(self.body, 2, hidden, use_reentrant=True)
            hidden = hidden + checkpoint(self.refine, hidden, use_reentrant=True)
        else:
            hidden = self.body(hidden)
            hidden = hidden + self.refine(hidden)
        return x - self.out(hidden)


def blobs(n):
    grid = torch.arange(10.0)
    centre = torch.rand(n, 2, 1, 1) * 9
    square = (grid[:, None] - centre[:, 0]) ** 2 + (grid[None, :] - centre[:, 1]) ** 2
    return torch.exp(-square / 6)[:, None]


def main():
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    test = blobs(100)
    noisy_test = test + 0.4 * torch.randn_like(test)
    for step in range(1, 71):
        clean = blobs(32)
        loss = F.mse_loss(model(clean + 0.4 * torch.randn_like(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            model.eval()
            with torch.no_grad():
                val = F.mse_loss(model(noisy_test), test).item()
            model.train()
            print(f"step {step}: loss {loss.item():.4f}, validation {val:.4f}")


if __name__ == "__main__":
    main()
