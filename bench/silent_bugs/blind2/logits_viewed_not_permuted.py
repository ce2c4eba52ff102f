"""Segmentation whose (B, C, H, W) logits are reshaped to rows of C numbers without a permute.

Each row then mixes values of one channel from C neighbouring pixels.
"""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CLASSES, SIZE, STEPS = 4, 16, 50


class SmallUNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, CLASSES, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.deep(skip))], dim=1))


def make_batch(n=8):
    coarse = torch.randint(CLASSES, (n, SIZE // 4, SIZE // 4))
    mask = coarse.repeat_interleave(4, 1).repeat_interleave(4, 2)
    palette = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])
    image = palette[mask].permute(0, 3, 1, 2) + 0.3 * torch.randn(n, 3, SIZE, SIZE)
    return image, mask


def main():
    torch.manual_seed(0)
    model = SmallUNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        image, mask = make_batch()
        logits = model(image)
        if FIXED:
            logits = logits.permute(0, 2, 3, 1)
        loss = criterion(logits.reshape(-1, CLASSES), mask.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")
    with torch.no_grad():
        image, mask = make_batch(32)
        right = (model(image).argmax(1) == mask).float().mean().item()
    print(f"evidence: pixel accuracy {right:.3f}")


if __name__ == "__main__":
    main()
