"""Activation checkpointing (use_reentrant=False) of blocks with dropout."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.1))
        self.down = nn.Linear(64, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(self.mlp(self.norm2(x)))


class Encoder(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.patch = nn.Linear(6, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.patch(x) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(x.mean(1))


def data(n, prototypes):
    y = torch.randint(0, 4, (n,))
    return TensorDataset(prototypes[y] + 1.2 * torch.randn(n, 8, 6), y)


def main():
    torch.manual_seed(0)
    prototypes = torch.randn(4, 8, 6)
    train, test = data(800, prototypes), data(300, prototypes)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(4):
        model.train()
        for step, (x, y) in enumerate(DataLoader(train, batch_size=50, shuffle=True)):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 8 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        model.eval()
        with torch.no_grad():
            x, y = test.tensors
            print(f"epoch {epoch}: accuracy {(model(x).argmax(1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
