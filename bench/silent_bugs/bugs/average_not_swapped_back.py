"""Diffusion of points with averaged weights, which are used for validation."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv


class EMA:
    def __init__(self, parameters, decay):
        self.decay = decay
        self.shadow = [p.detach().clone() for p in parameters]
        self.stored = None

    @torch.no_grad()
    def update(self, parameters):
        for s, p in zip(self.shadow, parameters, strict=True):
            s.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def store(self, parameters):
        self.stored = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def copy_to(self, parameters):
        for s, p in zip(self.shadow, parameters, strict=True):
            p.copy_(s)

    @torch.no_grad()
    def restore(self, parameters):
        for s, p in zip(self.stored, parameters, strict=True):
            p.copy_(s)
        self.stored = None


class NoiseNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.register_buffer("freqs", torch.exp(torch.linspace(0, 3, 8)))
        self.inp = nn.Linear(2 + 16, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        angles = t * self.freqs
        h = F.silu(self.inp(torch.cat([x, angles.sin(), angles.cos()], dim=1)))
        return self.out(F.silu(self.mid(h)))


def moons(count):
    angle = math.pi * torch.rand(count)
    side = torch.randint(0, 2, (count,)).float() * 2 - 1
    x = torch.stack([angle.cos() + 0.5 * side, angle.sin() * side], dim=1)
    return x + 0.05 * torch.randn(count, 2)


def loss_of(model, x, t, noise):
    noisy = torch.cos(t * math.pi / 2) * x + torch.sin(t * math.pi / 2) * noise
    return F.mse_loss(model(noisy, t), noise)


@torch.no_grad()
def validate(model, ema, batch):
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    model.eval()
    loss = loss_of(model, *batch).item()
    model.train()
    if FIXED:
        ema.restore(model.parameters())
    return loss


def main():
    torch.manual_seed(90)
    model = NoiseNet()
    ema = EMA(model.parameters(), decay=0.98)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    held_out = (moons(256), torch.rand(256, 1), torch.randn(256, 2))

    jump = 0.0
    for step in range(1, 101):
        x = moons(128)
        loss = loss_of(model, x, torch.rand(128, 1), torch.randn(128, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model.parameters())
        if step % 25 == 0:
            before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            valid = validate(model, ema, held_out)
            after = nn.utils.parameters_to_vector(model.parameters()).detach()
            jump = max(jump, (after - before).norm().item())
            print(f"step {step} loss {loss.item():.4f} valid loss {valid:.4f}")
        elif step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")

    print(f"evidence: validation changed the weights by {jump:.5f}")


if __name__ == "__main__":
    main()
