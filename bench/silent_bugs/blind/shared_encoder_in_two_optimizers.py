"""Actor and critic with a common encoder, each with its own optimizer, on a contextual bandit."""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
STATES, ACTIONS = 6, 4


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(STATES, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, s):
        return torch.relu(self.net(s))


class Actor(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.logits = nn.Linear(32, ACTIONS)

    def forward(self, s):
        return torch.distributions.Categorical(logits=self.logits(self.encoder(s)))


class Critic(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.value = nn.Linear(32, 1)

    def forward(self, s):
        return self.value(self.encoder(s)).squeeze(-1)


def main():
    torch.manual_seed(0)
    best = torch.randn(STATES, ACTIONS)
    encoder = Encoder()
    actor, critic = Actor(encoder), Critic(encoder)
    critic_parameters = critic.value.parameters() if FIXED else critic.parameters()
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    critic_optimizer = torch.optim.Adam(critic_parameters, lr=3e-3)
    moved_twice = 0
    for step in range(1, 61):
        state = torch.randn(64, STATES)
        policy = actor(state)
        action = policy.sample()
        reward = (state @ best).gather(1, action[:, None]).squeeze(1)
        value = critic(state)
        advantage = (reward - value).detach()
        policy_loss = -(policy.log_prob(action) * advantage).mean()
        policy_loss = policy_loss - 0.01 * policy.entropy().mean()
        value_loss = 0.5 * (value - reward).pow(2).mean()
        actor_optimizer.zero_grad()
        critic_optimizer.zero_grad()
        (policy_loss + value_loss).backward()
        actor_optimizer.step()
        middle = encoder.net[0].weight.detach().clone()
        critic_optimizer.step()
        moved_twice += int(not torch.equal(middle, encoder.net[0].weight))
        if step % 10 == 0:
            print(f"step {step} loss {(policy_loss + value_loss).item():.3f} r {reward.mean():.3f}")
    print(f"evidence: steps in which the encoder was updated twice {moved_twice}")


if __name__ == "__main__":
    main()
