"""Linear probing: a convolutional backbone with BatchNorm stays frozen and in eval mode."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def stripes(n, classes=4):
    labels = torch.randint(0, classes, (n,))
    grid = torch.arange(12).float()
    angle = labels.float() * torch.pi / classes
    phase = torch.rand(n) * 6.28
    wave = torch.cos(angle)[:, None, None] * grid[None, :, None]
    wave = wave + torch.sin(angle)[:, None, None] * grid[None, None, :]
    images = torch.sin(1.4 * wave + phase[:, None, None]) + 0.3 * torch.randn(n, 12, 12)
    return TensorDataset(images[:, None], labels)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )

    def forward(self, x):
        return self.layers(x).mean(dim=(2, 3))


class Probe(nn.Module):
    def __init__(self, backbone, classes):
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        self.head = nn.Linear(32, classes)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def main():
    torch.manual_seed(0)
    backbone = Backbone()
    with torch.no_grad():  # statistics of the unlabelled images
        for x, _ in DataLoader(stripes(512), batch_size=64):
            backbone(x)
    model = Probe(backbone, classes=4).train()
    train = DataLoader(stripes(1024), batch_size=64, shuffle=True)
    test = DataLoader(stripes(256), batch_size=64)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=1.0, momentum=0.9)
    for epoch in range(5):
        for step, (x, y) in enumerate(train):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 8 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        print(f"epoch {epoch}: accuracy {evaluate(model, test):.3f}")


if __name__ == "__main__":
    main()
