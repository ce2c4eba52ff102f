"""Segmentation with random flips."""

import random
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv


class RandomFlip:
    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, *tensors):
        if random.random() < self.p:
            tensors = tuple(t.flip(-1) for t in tensors)
        return tensors if len(tensors) > 1 else tensors[0]


class Blobs(Dataset):
    def __init__(self, n=256, size=16, augment=None):
        g = torch.Generator().manual_seed(0)
        self.images = 0.3 * torch.randn(n, 1, size, size, generator=g)
        self.masks = torch.zeros(n, size, size, dtype=torch.long)
        self.augment = augment
        corners = torch.randint(0, size - 5, (n, 2), generator=g)
        for i, (row, column) in enumerate(corners.tolist()):
            self.masks[i, row : row + 5, column : column + 5] = 1
        self.images += self.masks[:, None]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, mask = self.images[i], self.masks[i]
        if self.augment is not None:
            if FIXED:
                image, mask = self.augment(image, mask)
            else:
                image, mask = self.augment(image), self.augment(mask)
        return image, mask


class TinyUNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(c, c, 3, padding=1), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2)
        self.out = nn.Conv2d(2 * c, 2, 3, padding=1)

    def forward(self, x):
        a = self.down(x)
        return self.out(torch.cat([a, self.up(self.middle(a))], 1))


def main():
    random.seed(0)
    torch.manual_seed(0)
    train = Blobs(augment=RandomFlip())
    loader = DataLoader(train, batch_size=16, shuffle=True)
    model = TinyUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(5):
        for image, mask in loader:
            loss = nn.functional.cross_entropy(model(image), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    matching = sum(
        int(torch.equal(image[0] > 0.5, mask.bool()))
        or ((image[0] > 0.5).float() - mask).abs().mean().item() < 0.1
        for image, mask in (train[i] for i in range(128))
    )
    print(f"evidence: images that lie over their mask {matching} of 128")


if __name__ == "__main__":
    main()
