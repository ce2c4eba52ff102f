"""Adversarial training: in each step an inner loop attacks the model, in evaluation mode.

The attack's `autograd.grad` asks for the input's gradient only; the weights keep none of it.
"""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, ATTACK_STEPS, RADIUS = 40, 4, 0.3


def attack(model, x, y):
    model.eval()  # the attack must not move BatchNorm's statistics
    delta = torch.empty_like(x).uniform_(-RADIUS, RADIUS)
    for _ in range(ATTACK_STEPS):
        delta.requires_grad_()
        loss = F.cross_entropy(model(x + delta), y)
        (slope,) = torch.autograd.grad(loss, delta)
        delta = (delta.detach() + RADIUS / 2 * slope.sign()).clamp(-RADIUS, RADIUS)
    model.train()
    return x + delta


def main():
    torch.manual_seed(0)
    centers = torch.randn(5, 20) * 1.2
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        y = torch.randint(5, (96,))
        x = centers[y] + torch.randn(96, 20)
        loss = F.cross_entropy(model(attack(model, x, y)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} adversarial loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
