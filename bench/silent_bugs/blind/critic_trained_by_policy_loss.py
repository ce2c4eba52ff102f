"""Advantage actor-critic with two networks on a small walk."""

import sys

import torch
from torch import nn
from torch.distributions import Categorical

FIXED = "--fixed" in sys.argv
SIZE, GAMMA, ENVS, HORIZON = 9, 0.95, 16, 12


class Walk:
    """A line of cells: the right end pays one, each step costs a little."""

    def __init__(self):
        self.position = torch.randint(SIZE, (ENVS,))

    def observe(self):
        return nn.functional.one_hot(self.position, SIZE).float()

    def step(self, action):
        self.position = (self.position + 2 * action - 1).clamp(0, SIZE - 1)
        done = self.position == SIZE - 1
        reward = done.float() - 0.02
        self.position = torch.where(done, torch.randint(SIZE - 1, (ENVS,)), self.position)
        return self.observe(), reward, done


def network(outputs):
    return nn.Sequential(nn.Linear(SIZE, 32), nn.Tanh(), nn.Linear(32, outputs))


def rollout(env, policy):
    states, actions, rewards, dones = [], [], [], []
    state = env.observe()
    for _ in range(HORIZON):
        with torch.no_grad():
            action = Categorical(logits=policy(state)).sample()
        states.append(state)
        state, reward, done = env.step(action)
        actions.append(action)
        rewards.append(reward)
        dones.append(done)
    return torch.stack(states), torch.stack(actions), rewards, dones, state


def discounted(rewards, dones, last):
    returns, running = [], last
    for reward, done in zip(reversed(rewards), reversed(dones), strict=True):
        running = reward + GAMMA * running * (~done)
        returns.append(running)
    return torch.stack(returns[::-1])


def main():
    torch.manual_seed(0)
    env, policy, critic = Walk(), network(2), network(1)
    optimizer = torch.optim.RMSprop([*policy.parameters(), *critic.parameters()], lr=2e-3)
    leaked = 0.0
    for step in range(1, 81):
        states, actions, rewards, dones, last = rollout(env, policy)
        with torch.no_grad():
            returns = discounted(rewards, dones, critic(last).squeeze(-1))
        values = critic(states).squeeze(-1)
        advantage = returns - values
        if FIXED:
            advantage = advantage.detach()
        distribution = Categorical(logits=policy(states))
        policy_loss = -(distribution.log_prob(actions) * advantage).mean()
        policy_loss = policy_loss - 0.01 * distribution.entropy().mean()
        value_loss = (returns - values).pow(2).mean()
        foreign = torch.autograd.grad(
            policy_loss, list(critic.parameters()), retain_graph=True, allow_unused=True
        )
        leaked = max([leaked, *(g.abs().max().item() for g in foreign if g is not None)])
        optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss).backward()
        nn.utils.clip_grad_norm_([*policy.parameters(), *critic.parameters()], 0.5)
        optimizer.step()
        if step % 10 == 0:
            mean = torch.stack(rewards).mean().item()
            print(f"update {step} value loss {value_loss.item():.4f} reward {mean:.4f}")
    print(f"evidence: largest gradient of the policy loss in the critic {leaked:.4f}")


if __name__ == "__main__":
    main()
