"""Mixup: inputs and labels of two samples are mixed; labels are probabilities (N, C)."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 6


def mixup(x, y, alpha=0.4):
    weight = torch.distributions.Beta(alpha, alpha).sample()
    other = torch.randperm(len(x))
    hot = F.one_hot(y, CLASSES).float()
    return weight * x + (1 - weight) * x[other], weight * hot + (1 - weight) * hot[other]


class DepthwiseNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.pointwise = nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))
        self.head = nn.Linear(width * 16, CLASSES)

    def forward(self, x):
        x = F.gelu(self.norms[0](self.patches(x)))
        x = x + F.gelu(self.norms[1](self.depthwise(x)))
        x = F.gelu(self.norms[2](self.pointwise(x)))
        return self.head(x.flatten(1))


def images(n, prototypes):
    y = torch.randint(0, CLASSES, (n,))
    return TensorDataset(prototypes[y] + 1.5 * torch.randn(n, 3, 8, 8), y)


def main():
    torch.manual_seed(0)
    prototypes = torch.randn(CLASSES, 3, 8, 8)
    train, test = images(768, prototypes), images(300, prototypes)
    model = DepthwiseNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for epoch in range(5):
        model.train()
        for step, (x, y) in enumerate(DataLoader(train, batch_size=64, shuffle=True)):
            mixed, soft = mixup(x, y)
            loss = F.cross_entropy(model(mixed), soft)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 6 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        model.eval()
        with torch.no_grad():
            x, y = test.tensors
            print(f"epoch {epoch}: accuracy {(model(x).argmax(1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
