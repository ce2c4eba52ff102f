"""A Wasserstein GAN with gradient penalty on a mixture of Gaussians."""

import sys

import torch
from torch import autograd, nn

FIXED = "--fixed" in sys.argv
LAMBDA, CRITIC_STEPS, BATCH = 10.0, 3, 64


class Critic(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.body(x).squeeze(-1)


class Generator(nn.Module):
    def __init__(self, latent=4, width=48):
        super().__init__()
        self.latent = latent
        self.body = nn.Sequential(
            nn.Linear(latent, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 2),
        )

    def forward(self, n):
        return self.body(torch.randn(n, self.latent))


def gradient_norm(critic, real, fake, create_graph):
    alpha = torch.rand(len(real), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    if create_graph:
        (grad,) = autograd.grad(scores.sum(), mixed, create_graph=True)
    else:
        (grad,) = autograd.grad(scores.sum(), mixed, retain_graph=True)
    return grad.norm(dim=1)


def sample_real(n):
    centres = torch.tensor([[4.0, 0.0], [-4.0, 0.0], [0.0, 4.0], [0.0, -4.0]])
    return centres[torch.randint(4, (n,))] + 0.2 * torch.randn(n, 2)


def main():
    torch.manual_seed(0)
    critic, generator = Critic(), Generator()
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    for step in range(1, 31):
        for _ in range(CRITIC_STEPS):
            real = sample_real(BATCH)
            with torch.no_grad():
                fake = generator(BATCH)
            penalty = (gradient_norm(critic, real, fake, FIXED) - 1).pow(2).mean()
            loss_c = critic(fake).mean() - critic(real).mean() + LAMBDA * penalty
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
        opt_g.zero_grad()
        loss_g = -critic(generator(BATCH)).mean()
        loss_g.backward()
        opt_g.step()
        if step % 5 == 0:
            print(f"step {step} critic {loss_c.item():.3f} generator {loss_g.item():.3f}")
    norm = gradient_norm(critic, sample_real(256), generator(256).detach(), False).mean().item()
    print(f"evidence: mean gradient norm of the critic after training {norm:.3f} (wanted: about 1)")


if __name__ == "__main__":
    main()
