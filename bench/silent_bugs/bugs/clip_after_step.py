"""Policy network trained on noisy returns, with a limit on the gradient."""

import sys
from dataclasses import dataclass

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@dataclass
class Config:
    states: int = 10
    actions: int = 4
    hidden: int = 32
    batch: int = 64
    steps: int = 100
    lr: float = 0.05
    max_norm: float = 1.0


class Policy(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(cfg.states, cfg.hidden), nn.Tanh())
        self.logits = nn.Linear(cfg.hidden, cfg.actions)
        self.value = nn.Linear(cfg.hidden, 1)

    def forward(self, state):
        h = self.body(state)
        return torch.distributions.Categorical(logits=self.logits(h)), self.value(h).squeeze(-1)


class Bandit:
    """The best action depends on the state; the returns have heavy tails."""

    def __init__(self, cfg):
        self.table = torch.randn(cfg.states, cfg.actions)
        self.noise = torch.distributions.StudentT(2.0)

    def reward(self, state, action):
        score = (state @ self.table).gather(1, action[:, None]).squeeze(1)
        return score + self.noise.sample(score.shape)


def main():
    torch.manual_seed(64)
    cfg = Config()
    policy = Policy(cfg)
    env = Bandit(cfg)
    optimizer = torch.optim.SGD(policy.parameters(), lr=cfg.lr)

    largest = 0.0
    for step in range(1, cfg.steps + 1):
        state = torch.randn(cfg.batch, cfg.states)
        dist, value = policy(state)
        action = dist.sample()
        reward = env.reward(state, action)
        advantage = reward - value.detach()
        loss = -(dist.log_prob(action) * advantage).mean() + 0.5 * (reward - value).pow(2).mean()
        loss = loss - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        before = nn.utils.parameters_to_vector(policy.parameters()).detach()
        if FIXED:
            norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_norm)
            optimizer.step()
        else:
            optimizer.step()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_norm)
        after = nn.utils.parameters_to_vector(policy.parameters()).detach()
        largest = max(largest, (after - before).norm().item() / cfg.lr)
        if step % 10 == 0:
            mean = reward.mean().item()
            print(f"step {step} loss {loss.item():.3f} reward {mean:.3f} norm {norm.item():.2f}")

    print(f"evidence: largest gradient applied {largest:.4f}, the limit is {cfg.max_norm}")


if __name__ == "__main__":
    main()
