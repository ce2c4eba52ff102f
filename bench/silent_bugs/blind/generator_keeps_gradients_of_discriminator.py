"""A GAN on a ring of points."""

import argparse
import math
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()


def mlp(*sizes):
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def real_points(n):
    angle = 2 * math.pi * torch.rand(n)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


def main():
    torch.manual_seed(0)
    generator, discriminator = mlp(8, 32, 32, 2), mlp(2, 32, 32, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    worst = 0.0
    for step in range(1, args.steps + 1):
        opt_d.zero_grad()
        opt_g.zero_grad()
        fake = generator(torch.randn(64, 8))
        d_real = discriminator(real_points(64))
        d_fake = discriminator(fake.detach() if args.fixed else fake)
        loss_d = F.binary_cross_entropy_with_logits(d_real, ones)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(d_fake, zeros)
        loss_d.backward()
        opt_d.step()
        foreign = [p.grad.abs().max().item() for p in generator.parameters() if p.grad is not None]
        worst = max([worst, *foreign])

        loss_g = F.binary_cross_entropy_with_logits(
            discriminator(generator(torch.randn(64, 8))), ones
        )
        loss_g.backward()
        opt_g.step()
        if step % 10 == 0:
            print(f"step {step} loss_d {loss_d.item():.4f} loss_g {loss_g.item():.4f}")
    print(f"evidence: gradient of the discriminator's loss left in the generator {worst:.4f}")


if __name__ == "__main__":
    main()
