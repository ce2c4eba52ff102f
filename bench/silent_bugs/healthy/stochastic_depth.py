"""LayerDrop: whole residual layers are left out at random, and have no gradient in that step."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


class DropNet(nn.Module):
    def __init__(self, width=32, depth=5, drop=0.3):
        super().__init__()
        self.stem = nn.Linear(10, width)
        self.layers = nn.ModuleList(Residual(width) for _ in range(depth))
        self.drop = drop
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            if self.training and torch.rand(()).item() < self.drop:
                continue
            scale = 1 / (1 - self.drop) if self.training else 1.0
            x = x + scale * layer(x)
        return self.head(x)


def rings(n):
    x = torch.randn(n, 10)
    radius = x[:, :3].norm(dim=1)
    return TensorDataset(x, (radius > 1.2).long() + (radius > 1.9).long())


def main():
    torch.manual_seed(0)
    train, test = rings(1280), rings(500)
    model = DropNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    for epoch in range(6):
        model.train()
        for step, (x, y) in enumerate(DataLoader(train, batch_size=64, shuffle=True)):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                unused = sum(layer.fc1.weight.grad is None for layer in model.layers)
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}, unused {unused}")
        model.eval()
        with torch.no_grad():
            x, y = test.tensors
            print(f"epoch {epoch}: accuracy {(model(x).argmax(1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
