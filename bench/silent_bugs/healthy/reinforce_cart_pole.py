"""REINFORCE with a learned baseline on a small cart-pole simulation."""

import math

import torch
from torch import nn
from torch.distributions import Categorical


class CartPole:
    """The usual cart-pole equations; an episode ends when the pole falls or after 60 moves."""

    def __init__(self, generator):
        self.generator = generator

    def reset(self):
        self.state = (torch.rand(4, generator=self.generator) * 0.1 - 0.05).tolist()
        self.moves = 0
        return torch.tensor(self.state)

    def step(self, action):
        x, v, angle, spin = self.state
        force = 10.0 if action == 1 else -10.0
        sin, cos = math.sin(angle), math.cos(angle)
        temp = (force + 0.05 * spin * spin * sin) / 1.1
        spin_acc = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1))
        acc = temp - 0.05 * spin_acc * cos / 1.1
        self.state = [x + 0.02 * v, v + 0.02 * acc, angle + 0.02 * spin, spin + 0.02 * spin_acc]
        self.moves += 1
        fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21
        return torch.tensor(self.state), 1.0, fallen or self.moves >= 60


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actor = nn.Linear(32, 2)
        self.critic = nn.Linear(32, 1)

    def forward(self, state):
        hidden = self.body(state)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


def play(env, policy):
    states, actions, rewards = [], [], []
    state, done = env.reset(), False
    while not done:
        with torch.no_grad():
            action = policy(state)[0].sample()
        states.append(state)
        actions.append(action)
        state, reward, done = env.step(action.item())
        rewards.append(reward)
    return torch.stack(states), torch.stack(actions), rewards


def discounted(rewards, gamma=0.98):
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.append(total)
    return torch.tensor(returns[::-1])


def main():
    torch.manual_seed(0)
    env = CartPole(torch.Generator().manual_seed(1))
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for update in range(1, 61):
        episodes = [play(env, policy) for _ in range(4)]
        states = torch.cat([episode[0] for episode in episodes])
        actions = torch.cat([episode[1] for episode in episodes])
        returns = torch.cat([discounted(episode[2]) for episode in episodes])
        actions_given, values = policy(states)
        advantage = returns - values.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        policy_loss = -(actions_given.log_prob(actions) * advantage).mean()
        value_loss = nn.functional.mse_loss(values / 10, returns / 10)
        loss = policy_loss + 0.5 * value_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 6 == 0:
            print(f"update {update}: loss {loss.item():.3f}, length {len(states) / 4:.1f}")


if __name__ == "__main__":
    main()
