"""No optimizer object: weights are updated by hand under no_grad, as in the tutorials."""

import torch
from torch import nn


class Polynomial(nn.Module):
    def __init__(self, degree):
        super().__init__()
        self.coefficients = nn.Parameter(torch.randn(degree + 1) * 0.1)
        self.mlp = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        powers = torch.stack([x**k for k in range(len(self.coefficients))], dim=1)
        return powers @ self.coefficients + self.mlp(x[:, None]).squeeze(1)


def main():
    torch.manual_seed(0)
    model = Polynomial(3)
    x = torch.linspace(-1, 1, 200)
    y = torch.sin(3 * x)
    lr = 0.1
    for step in range(1, 101):
        rows = torch.randint(0, 200, (64,))
        loss = (model(x[rows]) - y[rows]).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
                parameter.grad = None
        if step % 10 == 0:
            with torch.no_grad():
                error = (model(x) - y).pow(2).mean().item()
            print(f"step {step}: loss {loss.item():.4f}, all points {error:.4f}")


if __name__ == "__main__":
    main()
