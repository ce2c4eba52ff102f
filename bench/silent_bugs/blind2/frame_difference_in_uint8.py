"""Frame differences between uint8 images: each fall in brightness wraps round to about 255."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv
FRAMES, SIZE = 4, 12


class MovingDots(Dataset):
    """Clips of a bright square that moves left, right, up or down over a grey background."""

    def __init__(self, n=640):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(4, (n,), generator=generator)
        start = torch.randint(4, 7, (n, 2), generator=generator)
        scene = torch.randint(80, 120, (n, 1, SIZE, SIZE), generator=generator)
        noise = torch.randint(-4, 5, (n, FRAMES, SIZE, SIZE), generator=generator)
        self.clips = scene + noise
        moves = torch.tensor([[0, -1], [0, 1], [-1, 0], [1, 0]])
        for i in range(n):
            for t in range(FRAMES):
                r, c = (start[i] + t * moves[self.labels[i]]).tolist()
                self.clips[i, t, r : r + 2, c : c + 2] = 150
        self.clips = self.clips.to(torch.uint8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        clip = self.clips[i]
        if FIXED:
            clip = clip.float()
        motion = clip[1:] - clip[:-1]
        return motion.float() / 255, self.labels[i]


def main():
    torch.manual_seed(0)
    data = MovingDots()
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(FRAMES - 1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(5):
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
    x = torch.stack([data[i][0] for i in range(64)])
    print(f"evidence: smallest input {x.min().item():.3f}, largest {x.max().item():.3f}")


if __name__ == "__main__":
    main()
