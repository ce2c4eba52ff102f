"""A Siamese network: the same encoder twice per forward, a contrastive loss over pairs."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, n, glyphs):
        self.glyphs = glyphs
        self.first = torch.randint(0, len(glyphs), (n,))
        other = torch.randint(0, len(glyphs), (n,))
        self.second = torch.where(torch.rand(n) < 0.5, self.first, other)
        self.noise = 0.7 * torch.randn(n, 2, 1, 10, 10)

    def __len__(self):
        return len(self.first)

    def __getitem__(self, i):
        a = self.glyphs[self.first[i]] + self.noise[i, 0]
        b = self.glyphs[self.second[i]] + self.noise[i, 1]
        return a, b, (self.first[i] == self.second[i]).float()


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 12)
        )

    def forward(self, a, b):
        return F.pairwise_distance(self.encoder(a), self.encoder(b))


def contrastive(distance, same, margin=2.0):
    near = same * distance.pow(2)
    far = (1 - same) * F.relu(margin - distance).pow(2)
    return (near + far).mean()


def main():
    torch.manual_seed(0)
    glyphs = torch.randn(12, 1, 10, 10)
    loader = DataLoader(Pairs(960, glyphs), batch_size=48, shuffle=True)
    test = DataLoader(Pairs(300, glyphs), batch_size=100)
    model = Siamese()
    optimizer = torch.optim.RAdam(model.parameters(), lr=3e-3)
    for epoch in range(5):
        for step, (a, b, same) in enumerate(loader):
            loss = contrastive(model(a, b), same)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        model.eval()
        with torch.no_grad():
            right = torch.cat([(model(a, b) < 1.0) == (same > 0) for a, b, same in test])
        model.train()
        print(f"epoch {epoch}: accuracy {right.float().mean():.3f}")


if __name__ == "__main__":
    main()
