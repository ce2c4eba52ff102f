"""LBFGS with a closure that is evaluated several times per step, in full batch."""

import torch
from torch import nn
from torch.nn import functional as F


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(2, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


def surface(x):
    return (torch.sin(x[:, :1] * 2) * torch.cos(x[:, 1:])).clone()


def main():
    torch.manual_seed(0)
    x = torch.rand(200, 2) * 3 - 1.5
    y = surface(x)
    test_x = torch.rand(200, 2) * 3 - 1.5
    model = SmallNet()
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.8, max_iter=4, history_size=10, line_search_fn="strong_wolfe"
    )
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for step in range(1, 46):
        loss = optimizer.step(closure)
        if step % 5 == 0:
            with torch.no_grad():
                test = F.mse_loss(model(test_x), surface(test_x)).item()
            print(f"step {step}: loss {loss.item():.5f}, test {test:.5f}, {calls} evaluations")


if __name__ == "__main__":
    main()
