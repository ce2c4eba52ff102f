"""Actor-critic whose policy loss sends its gradient through the advantage into the critic."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
STATES, ACTIONS, UPDATES, ENVS, HORIZON, GAMMA = 8, 4, 50, 32, 12, 0.95


class ActorCritic(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATES, hidden), nn.Tanh())
        self.actor = nn.Linear(hidden, ACTIONS)
        self.critic = nn.Linear(hidden, 1)

    def forward(self, obs):
        hidden = self.body(obs)
        dist = torch.distributions.Categorical(logits=self.actor(hidden))
        return dist, self.critic(hidden)[..., 0]


def rollout(model):
    """A corridor: odd actions go right, even ones left, and the last cell pays."""
    cell = torch.randint(STATES - 1, (ENVS,))
    logps, values, rewards = [], [], []
    for _ in range(HORIZON):
        dist, value = model(F.one_hot(cell, STATES).float())
        action = dist.sample()
        logps.append(dist.log_prob(action))
        values.append(value)
        cell = (cell + 2 * (action % 2) - 1).clamp(0, STATES - 1)
        rewards.append((cell == STATES - 1).float())
        cell = torch.where(cell == STATES - 1, torch.zeros_like(cell), cell)
    return torch.stack(logps), torch.stack(values), torch.stack(rewards)


def main():
    torch.manual_seed(0)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    error = 0.0
    for update in range(UPDATES):
        logps, values, rewards = rollout(model)
        returns, tail = torch.zeros_like(rewards), torch.zeros(ENVS)
        for t in reversed(range(HORIZON)):
            tail = rewards[t] + GAMMA * tail
            returns[t] = tail
        advantage = returns - values
        if FIXED:
            advantage = advantage.detach()
        policy_loss = -(logps * advantage).mean()
        value_loss = F.mse_loss(values, returns)
        loss = policy_loss + 0.5 * value_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        error = value_loss.item()
        if update % 10 == 9:
            print(f"update {update + 1} reward {rewards.sum(0).mean():.3f} value loss {error:.3f}")
    _, values, _ = rollout(model)
    print(f"evidence: mean value {values.mean():.3f}, mean return {returns.mean():.3f}")


if __name__ == "__main__":
    main()
