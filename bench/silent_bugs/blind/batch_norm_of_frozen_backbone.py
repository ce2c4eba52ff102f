"""Linear probing: a pretrained, frozen CNN and a new head on data with another brightness."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.layers(x).mean((2, 3))


class Probe(nn.Module):
    def __init__(self, backbone, classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(16, classes)
        for p in self.backbone.parameters():
            p.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        if FIXED:
            self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


def images(n, brightness):
    y = torch.randint(3, (n,))
    x = brightness + 0.5 * torch.randn(n, 3, 12, 12)
    x[torch.arange(n), y] += 0.8
    return TensorDataset(x, y)


def fit(model, loader, epochs, lr):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


def main():
    torch.manual_seed(0)
    backbone = Backbone()
    pretraining = nn.Sequential(backbone, nn.Linear(16, 3))
    fit(pretraining, DataLoader(images(256, 0.0), 32, shuffle=True), epochs=3, lr=5e-3)
    saved = {k: v.clone() for k, v in backbone.state_dict().items()}
    model = Probe(backbone, 3)
    fit(model, DataLoader(images(320, 1.5), 32, shuffle=True), epochs=5, lr=1e-2)
    moved = max(
        (v - saved[k]).abs().max().item()
        for k, v in backbone.state_dict().items()
        if "running" in k
    )
    print(f"evidence: running statistics of the frozen backbone moved by {moved:.4f}")


if __name__ == "__main__":
    main()
