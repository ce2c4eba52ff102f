"""A GAN on a ring of points: two networks, two optimizers, alternating steps."""

import torch
from torch import nn
from torch.nn import functional as F

LATENT, BATCH = 4, 128


def real_points(n):
    angle = torch.rand(n) * 2 * torch.pi
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    return circle + 0.05 * torch.randn(n, 2)


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, outputs),
    )


def radius_error(generator):
    generator.eval()
    with torch.no_grad():
        points = generator(torch.randn(1000, LATENT))
    generator.train()
    return (points.norm(dim=1) - 1).abs().mean().item()


def main():
    torch.manual_seed(0)
    generator, discriminator = mlp(LATENT, 2), mlp(2, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=3e-3, betas=(0.5, 0.9))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=3e-3, betas=(0.5, 0.9))
    ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    print(f"error of the radius before training {radius_error(generator):.3f}")
    for step in range(1, 111):
        real = real_points(BATCH)
        fake = generator(torch.randn(BATCH, LATENT))

        d_optimizer.zero_grad()
        d_loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        d_loss.backward()
        d_optimizer.step()

        g_optimizer.zero_grad()
        g_loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        g_loss.backward()  # also fills the discriminator's gradients; they are zeroed before use
        g_optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss D {d_loss.item():.3f} G {g_loss.item():.3f}")
    print(f"error of the radius after training {radius_error(generator):.3f}")


if __name__ == "__main__":
    main()
