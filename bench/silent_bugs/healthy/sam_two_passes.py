"""Sharpness-aware minimization: two forwards and backwards per step, weights moved in between."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class SAM:
    def __init__(self, base, rho=0.05):
        self.base, self.rho = base, rho
        self.moves = {}

    def parameters(self):
        return [p for group in self.base.param_groups for p in group["params"]]

    @torch.no_grad()
    def ascend(self):
        grads = [p.grad.norm() for p in self.parameters()]
        scale = self.rho / (torch.stack(grads).norm() + 1e-12)
        for p in self.parameters():
            self.moves[p] = p.grad * scale
            p.add_(self.moves[p])
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p in self.parameters():
            p.sub_(self.moves.pop(p))
        self.base.step()
        self.base.zero_grad()


def data(n, weights):
    x = torch.randn(n, 10)
    return TensorDataset(x, (torch.tanh(x @ weights[0]) @ weights[1]).argmax(1))


def main():
    torch.manual_seed(0)
    weights = torch.randn(10, 20) / 4, torch.randn(20, 4)
    train, test = data(960, weights), data(400, weights)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 4))
    sam = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for epoch in range(6):
        model.train()
        for x, y in DataLoader(train, batch_size=64, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            sam.ascend()
            F.cross_entropy(model(x), y).backward()
            sam.descend()
        model.eval()
        with torch.no_grad():
            x, y = test.tensors
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
