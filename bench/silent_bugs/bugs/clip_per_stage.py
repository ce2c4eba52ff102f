"""Two pipeline stages, each with its own optimizer and one limit on the gradient."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
MAX_NORM = 0.5


class FirstStage(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, dim, mode="sum")
        self.fc = nn.Linear(dim, dim)

    def forward(self, ids):
        return F.relu(self.fc(self.embed(ids)))


class LastStage(nn.Module):
    def __init__(self, dim=32, classes=6):
        super().__init__()
        self.fc = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        return self.out(F.relu(self.fc(x)))


class Stage:
    """A part of the model with what a rank of the pipeline has."""

    def __init__(self, module, lr):
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=lr)

    def squared_norm(self):
        return sum(p.grad.pow(2).sum() for p in self.module.parameters())

    def scale(self, factor):
        for p in self.module.parameters():
            p.grad.mul_(factor)


def forward_backward(stages, ids, labels):
    hidden = stages[0].module(ids)
    received = hidden.detach().requires_grad_()
    loss = F.cross_entropy(stages[1].module(received), labels)
    loss.backward()
    hidden.backward(received.grad)
    return loss.item()


def clip(stages):
    whole = sum(stage.squared_norm() for stage in stages).sqrt()
    for stage in stages:
        norm = whole if FIXED else stage.squared_norm().sqrt()
        stage.scale((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))


def main():
    torch.manual_seed(55)
    ids = torch.randint(0, 30, (900, 10))
    labels = (ids < 15).sum(1).clamp(2, 7) - 2
    loader = DataLoader(TensorDataset(ids, labels), batch_size=30, shuffle=True)
    stages = [Stage(FirstStage(), 0.2), Stage(LastStage(), 0.2)]

    step, largest = 0, 0.0
    for _epoch in range(3):
        for batch, target in loader:
            for stage in stages:
                stage.optimizer.zero_grad()
            loss = forward_backward(stages, batch, target)
            clip(stages)
            largest = max(largest, sum(s.squared_norm() for s in stages).sqrt().item())
            for stage in stages:
                stage.optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss:.4f}")

    print(f"evidence: largest norm of the whole gradient {largest:.4f}, the limit is {MAX_NORM}")


if __name__ == "__main__":
    main()
