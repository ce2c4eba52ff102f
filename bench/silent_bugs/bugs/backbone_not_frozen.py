"""Linear probe on the features of a convolutional backbone."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv


def conv(inp, out, stride):
    return nn.Sequential(nn.Conv2d(inp, out, 3, stride, 1), nn.GroupNorm(4, out), nn.LeakyReLU(0.1))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage1 = conv(3, 16, 2)
        self.stage2 = conv(16, 32, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        return self.pool(self.stage2(self.stage1(x))).flatten(1)


class Probe(nn.Module):
    def __init__(self, backbone, classes):
        super().__init__()
        self.backbone = backbone
        self.fc = nn.Linear(32, classes)
        self._freeze()

    def _freeze(self):
        if FIXED:
            self.backbone.requires_grad_(False)
        else:
            self.backbone.requires_grad = False

    def forward(self, x):
        return self.fc(self.backbone(x))


def make_images(count):
    labels = torch.randint(0, 4, (count,))
    tint = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0.5, 0.5, 0]])
    images = 0.8 * torch.randn(count, 3, 12, 12) + tint[labels][:, :, None, None]
    return TensorDataset(images, labels)


def main():
    torch.manual_seed(30)
    backbone = Backbone()
    model = Probe(backbone, classes=4)
    train_loader = DataLoader(make_images(640), batch_size=32, shuffle=True, drop_last=True)
    test_images, test_labels = make_images(100).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)
    released = {k: v.clone() for k, v in backbone.state_dict().items()}

    step = 0
    for epoch in range(3):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}")
        model.eval()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean().item()
        print(f"epoch {epoch} test accuracy {right:.3f}")

    drift = max((v - released[k]).abs().max().item() for k, v in backbone.state_dict().items())
    print(f"evidence: largest change of the backbone {drift:.6f}")


if __name__ == "__main__":
    main()
