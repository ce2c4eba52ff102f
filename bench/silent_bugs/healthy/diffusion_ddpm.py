"""A denoising diffusion model on two-dimensional points, with a zero-initialised last layer."""

import math

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 50
BETAS = torch.linspace(1e-3, 0.12, STEPS)
ALPHAS = torch.cumprod(1 - BETAS, 0)


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, math.log(50), 16)))
        self.time = nn.Linear(32, width)
        self.inputs = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        phase = t[:, None] / STEPS * self.frequencies
        hidden = self.inputs(x) + self.time(torch.cat([phase.sin(), phase.cos()], 1))
        for block in self.blocks:
            hidden = hidden + F.silu(block(F.silu(hidden)))
        return self.out(hidden)


def spiral(n):
    angle = torch.rand(n).sqrt() * 9
    return torch.stack([angle * angle.cos(), angle * angle.sin()], 1) / 5


def diffuse(x, t, noise):
    a = ALPHAS[t][:, None]
    return a.sqrt() * x + (1 - a).sqrt() * noise


@torch.no_grad()
def validation_loss(model, x):
    generator = torch.Generator().manual_seed(7)  # the same noise in each evaluation
    t = torch.randint(0, STEPS, (len(x),), generator=generator)
    noise = torch.randn(x.shape, generator=generator)
    model.eval()
    loss = F.mse_loss(model(diffuse(x, t, noise), t), noise)
    model.train()
    return loss.item()


@torch.no_grad()
def sample(model, n):
    x = torch.randn(n, 2)
    for t in reversed(range(STEPS)):
        noise = model(x, torch.full((n,), t))
        x = (x - BETAS[t] / (1 - ALPHAS[t]).sqrt() * noise) / (1 - BETAS[t]).sqrt()
        if t > 0:
            x = x + BETAS[t].sqrt() * torch.randn_like(x)
    return x


def main():
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    held_out = spiral(500)
    for step in range(1, 121):
        x = spiral(256)
        t = torch.randint(0, STEPS, (256,))
        noise = torch.randn_like(x)
        loss = F.mse_loss(model(diffuse(x, t, noise), t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            val = validation_loss(model, held_out)
            print(f"step {step}: loss {loss.item():.3f}, validation {val:.3f}")
    print(f"spread of samples {sample(model, 200).std():.2f}, of data {held_out.std():.2f}")


if __name__ == "__main__":
    main()
