"""Train a classifier with an optimizer whose update is captured as a graph once."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv


def update(param, grad, momentum, lr):
    momentum = momentum.mul_(0.9).add_(grad)
    return param.sub_(momentum * lr)


class CapturedSGD(torch.optim.Optimizer):
    """SGD with momentum; the update of each parameter is traced at its first step."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.graphs = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                self._run(p, p.grad, self.state[p]["momentum_buffer"], group["lr"])

    def _run(self, p, grad, buffer, lr):
        if FIXED:
            lr = torch.tensor(lr)
        if p not in self.graphs:
            dummy = (p.detach().clone(), grad.clone(), buffer.clone(), lr)
            self.graphs[p] = make_fx(update)(*dummy)
        self.graphs[p](p.detach(), grad, buffer, lr)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 5, padding=2)
        self.fc1 = nn.Linear(16 * 8, 32)
        self.fc2 = nn.Linear(32, 3)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.conv(x)), 4)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def signals(count):
    t = torch.linspace(0, 6.28, 32)
    y = torch.randint(0, 3, (count,))
    phase = torch.rand(count, 4, 1) * 6.28
    x = torch.sin(t * (1 + y.view(-1, 1, 1)) + phase) + 0.7 * torch.randn(count, 4, 32)
    return TensorDataset(x, y)


def main():
    torch.manual_seed(14)
    loader = DataLoader(signals(640), batch_size=32, shuffle=True)
    model = Net()
    base = 0.02
    total = 4 * len(loader)
    optimizer = CapturedSGD(model.parameters(), lr=base)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * min(s, total) / total))
    )

    step, ratio = 0, 0.0
    for _epoch in range(4):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            old = model.fc2.weight.detach().clone()
            optimizer.step()
            buffer = optimizer.state[model.fc2.weight]["momentum_buffer"]
            ratio = (old - model.fc2.weight.detach()).norm().item() / buffer.norm().item()
            lr = scheduler.get_last_lr()[0]
            scheduler.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f} lr {lr:.5f}")

    print(f"evidence: last update used lr {ratio:.6f}, the schedule said {lr:.6f}")


if __name__ == "__main__":
    main()
