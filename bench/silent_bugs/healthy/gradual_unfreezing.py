"""Fine-tuning with gradual unfreezing: the head first, then one more block every 20 steps."""

import torch
from torch import nn
from torch.nn import functional as F


class Encoder(nn.Module):
    def __init__(self, width=48, blocks=3, classes=5):
        super().__init__()
        self.stem = nn.Linear(20, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batches(centres, count, size=64):
    for _ in range(count):
        y = torch.randint(0, len(centres), (size,))
        yield centres[y] + torch.randn(size, 20), y


def pretrain(model, centres):
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for x, y in batches(centres, 40):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def main():
    torch.manual_seed(0)
    model = Encoder()
    pretrain(model, torch.randn(5, 20))
    model.head = nn.Linear(48, 7)
    new_centres = torch.randn(7, 20) * 0.8

    for parameter in model.parameters():
        parameter.requires_grad = False
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=5e-3)
    frozen = [model.stem, *model.blocks]
    for step, (x, y) in enumerate(batches(new_centres, 90), start=1):
        if step % 20 == 0 and frozen:
            block = frozen.pop().requires_grad_(True)
            optimizer.add_param_group({"params": list(block.parameters()), "lr": 1e-3})
            print(f"step {step}: one more block is trained, {len(frozen)} are still frozen")
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        x, y = next(batches(new_centres, 1, 1000))
        print(f"accuracy {(model(x).argmax(1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
