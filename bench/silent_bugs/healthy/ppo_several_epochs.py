"""PPO on a target-reaching task: each rollout is used for several epochs of minibatches."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Normal


@dataclass
class Config:
    envs: int = 32
    horizon: int = 16
    rollouts: int = 10
    epochs: int = 3
    minibatches: int = 4
    gamma: float = 0.95
    lam: float = 0.9
    clip: float = 0.2
    lr: float = 3e-3


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def forward(self, state):
        return Normal(self.actor(state), self.log_std.exp()), self.critic(state).squeeze(-1)


def rollout(model, state, cfg):
    keep = {"state": [], "action": [], "log_prob": [], "value": [], "reward": []}
    with torch.no_grad():
        for _ in range(cfg.horizon):
            policy, value = model(state)
            action = policy.sample()
            position = state[:, :2] + 0.2 * action.clamp(-1, 1)
            reward = -(position - state[:, 2:]).norm(dim=-1)
            keep["state"].append(state)
            keep["action"].append(action)
            keep["log_prob"].append(policy.log_prob(action).sum(-1))
            keep["value"].append(value)
            keep["reward"].append(reward)
            state = torch.cat([position, state[:, 2:]], dim=1)
        last = model(state)[1]
    return {name: torch.stack(values) for name, values in keep.items()}, last


def advantages(data, last, cfg):
    running, result = torch.zeros_like(last), []
    following = last
    for t in reversed(range(cfg.horizon)):
        delta = data["reward"][t] + cfg.gamma * following - data["value"][t]
        running = delta + cfg.gamma * cfg.lam * running
        following = data["value"][t]
        result.append(running)
    return torch.stack(result[::-1])


def main():
    torch.manual_seed(3)
    cfg = Config()
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, eps=1e-5)
    for number in range(cfg.rollouts):
        start = torch.rand(cfg.envs, 4) * 2 - 1
        data, last = rollout(model, start, cfg)
        advantage = advantages(data, last, cfg).flatten()
        returns = advantage + data["value"].flatten()
        states, actions = data["state"].flatten(0, 1), data["action"].flatten(0, 1)
        old = data["log_prob"].flatten()
        for _ in range(cfg.epochs):
            for index in torch.randperm(len(states)).chunk(cfg.minibatches):
                policy, value = model(states[index])
                ratio = (policy.log_prob(actions[index]).sum(-1) - old[index]).exp()
                weight = advantage[index]
                weight = (weight - weight.mean()) / (weight.std() + 1e-8)
                clipped = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
                policy_loss = -torch.min(ratio * weight, clipped * weight).mean()
                value_loss = nn.functional.mse_loss(value, returns[index])
                loss = policy_loss + 0.05 * value_loss - 1e-3 * policy.entropy().sum(-1).mean()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        print(f"rollout {number}: loss {loss.item():.3f}, reward {data['reward'].mean():.3f}")


if __name__ == "__main__":
    main()
