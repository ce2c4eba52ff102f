"""Two tasks share a trunk; a step trains one of the heads, the other one is unused."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(32, 4), "amount": nn.Linear(32, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def make(n):
    x = torch.randn(n, 12)
    hidden = torch.tanh(x[:, :6] + x[:, 6:])
    kind = hidden[:, :4].argmax(1)
    return x, kind, hidden.sum(1, keepdim=True)


def loss_of(model, task, x, y):
    output = model(x, task)
    return F.cross_entropy(output, y) if task == "kind" else F.mse_loss(output, y)


def main():
    torch.manual_seed(0)
    x, kind, _ = make(960)
    kinds = DataLoader(TensorDataset(x, kind), batch_size=48, shuffle=True)
    x, _, amount = make(480)
    amounts = DataLoader(TensorDataset(x, amount), batch_size=48, shuffle=True)
    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        pairs = zip(kinds, itertools.chain(amounts, amounts), strict=False)
        for number, (a, b) in enumerate(pairs):
            for task, (inputs, targets) in (("kind", a), ("amount", b)):
                loss = loss_of(model, task, inputs, targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if number % 10 == 0:
                    print(f"epoch {epoch} batch {number}: loss of {task} {loss.item():.3f}")
    model.eval()
    x, kind, amount = make(500)
    with torch.no_grad():
        accuracy = (model(x, "kind").argmax(1) == kind).float().mean().item()
        error = F.mse_loss(model(x, "amount"), amount).item()
    print(f"accuracy {accuracy:.3f}, error {error:.3f} (variance {amount.var().item():.3f})")


if __name__ == "__main__":
    main()
