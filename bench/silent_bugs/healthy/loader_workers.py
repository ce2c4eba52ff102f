"""A DataLoader with two workers that augment images with random numbers of their own."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Augmented(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        shift = int(np.random.randint(-1, 2))
        image = image.roll(shift, dims=-1) + 0.3 * torch.randn_like(image)
        return image, self.labels[index]


def seed_worker(_worker):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def symmetric_patterns(count):
    half = torch.randn(count, 1, 8, 4)
    return torch.cat([half, half.flip(-1)], dim=-1)


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12 * 16, classes)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1))


def main():
    torch.manual_seed(0)
    patterns = symmetric_patterns(5)
    labels = torch.randint(0, 5, (512,))
    loader = DataLoader(
        Augmented(patterns[labels], labels),
        batch_size=32,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=seed_worker,
        generator=torch.Generator().manual_seed(0),
    )
    model = Net(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    for epoch in range(4):
        for step, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
