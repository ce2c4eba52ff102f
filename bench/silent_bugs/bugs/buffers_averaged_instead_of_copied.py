"""Policy cloning with a running observation normaliser and an averaged copy for evaluation."""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

FIXED = "--fixed" in sys.argv


class RunningNormaliser(nn.Module):
    """Exact mean and variance of all observations so far."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("square", torch.zeros(size))

    def forward(self, x):
        if self.training:
            new = self.count + len(x)
            self.mean += (x.sum(0) - len(x) * self.mean) / new
            self.square += (x.square().sum(0) - len(x) * self.square) / new
            self.count.copy_(new)
        spread = (self.square - self.mean.square()).clamp(min=1e-4).sqrt()
        return (x - self.mean) / spread


class Policy(nn.Module):
    def __init__(self, observations=10, actions=3):
        super().__init__()
        self.normaliser = RunningNormaliser(observations)
        self.body = nn.Sequential(nn.Linear(observations, 48), nn.Tanh(), nn.Linear(48, 48))
        self.actions = nn.Linear(48, actions)

    def forward(self, x):
        return self.actions(torch.tanh(self.body(self.normaliser(x))))


class Expert:
    """Acts on observations whose distribution moves while the episode goes on."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)
        self.scale = torch.logspace(-1, 1, 10)
        self.weight = torch.randn(10, 3, generator=self.generator)

    def sample(self, step, size=64):
        state = torch.randn(size, 10, generator=self.generator) + 0.02 * step
        return state * self.scale, torch.tanh(state @ self.weight * 0.5)


def main():
    torch.manual_seed(2)
    policy, expert = Policy(), Expert()
    average = AveragedModel(policy, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=not FIXED)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for step in range(1, 101):
        policy.train()
        observation, action = expert.sample(step)
        loss = nn.functional.mse_loss(policy(observation), action)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(policy)
        if step % 20 == 0:
            average.eval()
            with torch.no_grad():
                observation, action = expert.sample(step)
                error = nn.functional.mse_loss(average(observation), action).item()
            print(f"step {step} loss {loss.item():.4f} averaged policy {error:.4f}")

    own, other = policy.normaliser.count.item(), average.module.normaliser.count.item()
    print(f"evidence: {own} observations counted by the policy, {other} by its average")


if __name__ == "__main__":
    main()
