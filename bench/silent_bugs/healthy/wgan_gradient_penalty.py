"""WGAN-GP: four critic steps per generator step, with a penalty on the gradient of the input."""

import argparse

import torch
from torch import autograd, nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--critic-steps", type=int, default=4)
parser.add_argument("--penalty", type=float, default=10.0)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


class Generator(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.latent = latent
        self.net = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, n):
        return self.net(torch.randn(n, self.latent))


def real_points(n):
    centres = torch.tensor([[1.0, 0.5], [1.5, 1.0], [1.0, 1.5]])
    return centres[torch.randint(0, 3, (n,))] + 0.1 * torch.randn(n, 2)


def gradient_penalty(critic, real, fake):
    weight = torch.rand(len(real), 1)
    between = (weight * real + (1 - weight) * fake).requires_grad_(True)
    score = critic(between)
    (slope,) = autograd.grad(score.sum(), between, create_graph=True, retain_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def main(args):
    torch.manual_seed(1)
    critic, generator = Critic(), Generator()
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.9))
    for step in range(1, args.steps + 1):
        for _ in range(args.critic_steps):
            real = real_points(96)
            with torch.no_grad():
                fake = generator(96)
            distance = critic(fake).mean() - critic(real).mean()
            critic_loss = distance + args.penalty * gradient_penalty(critic, real, fake)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
        critic.requires_grad_(False)
        generator_loss = -critic(generator(96)).mean()
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        critic.requires_grad_(True)
        if step % 4 == 0:
            with torch.no_grad():
                gap = (generator(1000).mean(0) - real_points(1000).mean(0)).norm()
            print(f"step {step}: critic {critic_loss.item():.3f}, distance of means {gap:.3f}")


if __name__ == "__main__":
    main(parser.parse_args())
