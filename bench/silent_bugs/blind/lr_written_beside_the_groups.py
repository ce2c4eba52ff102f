"""Train a small CNN on generated images and divide the learning rate by ten twice."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
BASE_LR = 0.1
DECAY_EPOCHS = (3, 5)


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(64, classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def make_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 0.5 * torch.randn(n, 1, 12, 12, generator=g)
    y = torch.randint(4, (n,), generator=g)
    for i, label in enumerate(y.tolist()):
        row, column = divmod(label, 2)
        x[i, 0, row * 6 : row * 6 + 6, column * 6 : column * 6 + 6] += 0.7
    return TensorDataset(x, y)


def adjust_learning_rate(optimizer, epoch):
    lr = BASE_LR * 0.1 ** sum(epoch >= e for e in DECAY_EPOCHS)
    if FIXED:
        for group in optimizer.param_groups:
            group["lr"] = lr
    else:
        optimizer.defaults["lr"] = lr
    return lr


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return hits / len(loader.dataset)


def main():
    torch.manual_seed(0)
    train = DataLoader(make_images(320, 1), batch_size=32, shuffle=True)
    test = DataLoader(make_images(128, 2), batch_size=64)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR, momentum=0.9, weight_decay=1e-4)
    for epoch in range(7):
        lr = adjust_learning_rate(optimizer, epoch)
        for x, y in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} lr {lr:g} loss {loss.item():.4f} acc {accuracy(model, test):.3f}")
    used = optimizer.param_groups[0]["lr"]
    print(f"evidence: learning rate of the last step {used:g}, planned {lr:g}")


if __name__ == "__main__":
    main()
