"""Evolution strategies: the whole training runs without gradients, in `no_grad` and `eval`."""

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STEPS, PAIRS, SIGMA = 30, 24, 0.05


@torch.no_grad()
def reward(policy, target):
    """A point mass is steered to its target in ten moves."""
    place, speed = torch.zeros_like(target), torch.zeros_like(target)
    total = 0.0
    for _ in range(10):
        speed = 0.8 * speed + 0.3 * policy(torch.cat([target - place, speed], dim=1)).tanh()
        place = place + speed
        total -= (target - place).pow(2).sum(1).mean().item()
    return total


@torch.no_grad()
def main():
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).eval()
    center = parameters_to_vector(policy.parameters())
    optimizer = torch.optim.Adam([center], lr=0.05)
    for step in range(STEPS):
        target = torch.randn(32, 2)
        estimate = torch.zeros_like(center)
        for _ in range(PAIRS):
            noise = torch.randn_like(center)
            gains = []
            for sign in (1, -1):
                vector_to_parameters(center + sign * SIGMA * noise, policy.parameters())
                gains.append(reward(policy, target))
            estimate += (gains[0] - gains[1]) * noise / (2 * SIGMA * PAIRS)
        center.grad = -estimate
        optimizer.step()
        vector_to_parameters(center, policy.parameters())
        if step % 5 == 4:
            print(f"step {step + 1} reward {reward(policy, target):.3f}")


if __name__ == "__main__":
    main()
