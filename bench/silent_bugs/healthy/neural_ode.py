"""A neural ODE: one small network is called at every step of a Runge-Kutta solver."""

import torch
from torch import nn
from torch.nn import functional as F


class Dynamics(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        nn.init.normal_(self.net[-1].weight, std=0.01)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, state):
        return self.net(state)


def integrate(f, state, steps, dt):
    path = [state]
    for _ in range(steps):
        k1 = f(state)
        k2 = f(state + dt / 2 * k1)
        k3 = f(state + dt / 2 * k2)
        k4 = f(state + dt * k3)
        state = state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        path.append(state)
    return torch.stack(path)


def oscillator(state):
    x, v = state.unbind(-1)
    return torch.stack([v, -2 * x - 0.3 * v], dim=-1)


def main():
    torch.manual_seed(0)
    model = Dynamics()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 91):
        start = torch.randn(48, 2)
        with torch.no_grad():
            truth = integrate(oscillator, start, steps=6, dt=0.15)
        loss = F.mse_loss(integrate(model, start, steps=6, dt=0.15), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.5f}")
    model.eval()
    with torch.no_grad():
        start = torch.randn(100, 2)
        truth = integrate(oscillator, start, 12, 0.15)
        print(f"test {F.mse_loss(integrate(model, start, 12, 0.15), truth).item():.5f}")


if __name__ == "__main__":
    main()
