"""MAML on sine waves: inner steps on copies of the weights through functional_call."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
        )

    def forward(self, x):
        return self.layers(x)


def task():
    amplitude, phase = 0.5 + 2 * torch.rand(()), 3.14 * torch.rand(())

    def draw(n):
        x = torch.rand(n, 1) * 6 - 3
        return x, amplitude * torch.sin(x + phase)

    return draw


def adapt(model, weights, x, y, lr=0.05, steps=2, create_graph=True):
    for _ in range(steps):
        loss = F.mse_loss(functional_call(model, weights, (x,)), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=create_graph)
        weights = {
            name: value - lr * grad
            for (name, value), grad in zip(weights.items(), grads, strict=True)
        }
    return weights


def evaluate(model, tasks):
    before, after = 0.0, 0.0
    for draw in tasks:
        support, query = draw(10), draw(50)
        weights = dict(model.named_parameters())
        adapted = adapt(model, weights, *support, create_graph=False)
        with torch.no_grad():
            before += F.mse_loss(model(query[0]), query[1]).item() / len(tasks)
            prediction = functional_call(model, adapted, (query[0],))
            after += F.mse_loss(prediction, query[1]).item() / len(tasks)
    return before, after


def main():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    test_tasks = [task() for _ in range(10)]
    for step in range(1, 101):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(4):
            draw = task()
            adapted = adapt(model, dict(model.named_parameters()), *draw(10))
            x, y = draw(10)
            loss = F.mse_loss(functional_call(model, adapted, (x,)), y) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        if step % 20 == 0:
            before, after = evaluate(model, test_tasks)
            print(f"step {step}: loss {total:.3f}, test {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    main()
