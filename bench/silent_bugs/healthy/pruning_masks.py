"""Iterative magnitude pruning with torch.nn.utils.prune: masked weights stay at zero."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3)
        self.fc1 = nn.Linear(12 * 16, 48)
        self.fc2 = nn.Linear(48, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def images(n, prototypes):
    y = torch.randint(0, 5, (n,))
    return TensorDataset(prototypes[y] + 1.2 * torch.randn(n, 1, 10, 10), y)


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    x, y = data.tensors
    result = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return result


def sparsity(modules):
    zeros = sum((m.weight == 0).sum().item() for m in modules)
    return zeros / sum(m.weight.numel() for m in modules)


def main():
    torch.manual_seed(0)
    prototypes = torch.randn(5, 1, 10, 10)
    train, test = images(640, prototypes), images(300, prototypes)
    model = LeNet()
    pruned = [model.conv, model.fc1]
    for module in pruned:
        prune.identity(module, "weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for round_number in range(4):
        for _ in range(2):
            for x, y in DataLoader(train, batch_size=64, shuffle=True):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print(
            f"round {round_number}: loss {loss.item():.3f}, accuracy {accuracy(model, test):.3f}, "
            f"zeros {sparsity(pruned):.2f}"
        )
        if round_number < 3:
            prune.global_unstructured(
                [(m, "weight") for m in pruned], prune.L1Unstructured, amount=0.4
            )
    for module in pruned:
        prune.remove(module, "weight")
    print(f"final: accuracy {accuracy(model, test):.3f}, zeros {sparsity(pruned):.2f}")


if __name__ == "__main__":
    main()
