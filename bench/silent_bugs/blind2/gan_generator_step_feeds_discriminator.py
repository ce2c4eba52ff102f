"""A GAN that clears the discriminator's gradients at the wrong place.

The generator's backward pass also writes gradients into the discriminator. They are still there
when the discriminator's own step is made, and push it towards calling generated points real.
"""

import itertools
import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
STEPS, BATCH, NOISE = 60, 64, 8


def mlp(*sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def ring(n):
    angle = torch.rand(n) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.05 * torch.randn(n, 2)


def bce(logits, value):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


def main():
    torch.manual_seed(0)
    gen, disc = mlp(NOISE, 32, 32, 2), mlp(2, 32, 32, 1)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.999))
    gap = 0.0
    for step in range(STEPS):
        fake = gen(torch.randn(BATCH, NOISE))
        opt_g.zero_grad()
        loss_g = bce(disc(fake), 1.0)
        loss_g.backward()
        opt_g.step()

        if FIXED:
            opt_d.zero_grad()
        gap += sum(p.grad.norm().item() for p in disc.parameters() if p.grad is not None)
        loss_d = bce(disc(ring(BATCH)), 1.0) + bce(disc(fake.detach()), 0.0)
        loss_d.backward()
        opt_d.step()
        if not FIXED:
            opt_d.zero_grad()
        if step % 15 == 14:
            print(f"step {step + 1} g {loss_g.item():.3f} d {loss_d.item():.3f}")
    print(f"evidence: mean size of what stood in disc's .grad before backward {gap / STEPS:.4f}")


if __name__ == "__main__":
    main()
