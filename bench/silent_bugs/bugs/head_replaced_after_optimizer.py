"""Transfer a small convolutional network to a new set of classes."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv


class Stripes(Dataset):
    """Images with stripes; the class is their direction and width."""

    def __init__(self, count, seed):
        gen = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 6, (count,), generator=gen)
        grid = torch.arange(16).float()
        images = []
        for label in self.labels.tolist():
            wave = torch.sin(grid * (0.6 + 0.5 * (label // 2)))
            image = wave.repeat(16, 1)
            images.append(image if label % 2 == 0 else image.t())
        noise = 0.6 * torch.randn(count, 16, 16, generator=gen)
        self.images = (torch.stack(images) + noise).unsqueeze(1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class ConvNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(24 * 4, classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def pretrained():
    torch.manual_seed(3)
    return ConvNet(classes=1000)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return hits / len(loader.dataset)


def main():
    model = pretrained()
    train_loader = DataLoader(Stripes(512, 0), batch_size=32, shuffle=True)
    test_loader = DataLoader(Stripes(128, 1), batch_size=64)

    if FIXED:
        model.classifier = nn.Linear(24 * 4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    if not FIXED:
        model.classifier = nn.Linear(24 * 4, 6)
    start = model.classifier.weight.detach().clone()

    model.train()
    step = 0
    for epoch in range(4):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 8 == 0:
                print(f"step {step} loss {loss.item():.4f}")
        scheduler.step()
        print(f"epoch {epoch} accuracy {accuracy(model, test_loader):.3f}")

    change = (model.classifier.weight.detach() - start).norm().item()
    print(f"evidence: norm of the change of classifier.weight {change:.5f}")


if __name__ == "__main__":
    main()
