"""A physics-informed network solves u'' = -u: gradients with respect to the inputs."""

import torch
from torch import nn


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def forward(self, x):
        return self.net(x)


def derivative(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def residual(model, x):
    x = x.requires_grad_(True)
    u = model(x)
    return derivative(derivative(u, x), x) + u


def boundary(model):
    x = torch.zeros(1, 1, requires_grad=True)
    u = model(x)
    return u.pow(2).mean() + (derivative(u, x) - 1).pow(2).mean()


def main():
    torch.manual_seed(0)
    model = Field()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    grid = torch.linspace(0, 2, 50)[:, None]
    for step in range(1, 121):
        x = torch.rand(64, 1) * 2
        loss = residual(model, x).pow(2).mean() + 2 * boundary(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 15 == 0:
            with torch.no_grad():
                error = (model(grid) - grid.sin()).abs().max().item()
            print(f"step {step}: loss {loss.item():.5f}, largest error {error:.4f}")


if __name__ == "__main__":
    main()
