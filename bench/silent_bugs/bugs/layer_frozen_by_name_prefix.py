"""Fine-tune a deep residual network; its first layers stay as they are."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

FREEZE = 2


class ResidualLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, dim)

    def forward(self, x):
        return x + F.relu(self.fc(self.norm(x)))


class DeepNet(nn.Module):
    def __init__(self, features, dim=40, depth=12, classes=3):
        super().__init__()
        self.stem = nn.Linear(features, dim)
        self.layers = nn.ModuleList(ResidualLayer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def freeze_first_layers(model, count, exact):
    end = "." if exact else ""
    prefixes = tuple(f"layers.{i}{end}" for i in range(count))
    for name, param in model.named_parameters():
        if name.startswith(prefixes):
            param.requires_grad_(False)


def run_epoch(model, loader, optimizer=None):
    total = 0.0
    for x, y in loader:
        with torch.set_grad_enabled(optimizer is not None):
            loss = F.cross_entropy(model(x), y)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total += loss.item()
    return total / len(loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(17)

    x = torch.randn(700, 12)
    y = (x[:, 0].abs() + x[:, 1].abs() + x[:, 2].abs()).mul(0.8).long().clamp(max=2)
    train_set, valid_set = random_split(TensorDataset(x, y), [576, 124])
    train_loader = DataLoader(train_set, batch_size=48, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=124)

    model = DeepNet(12)
    freeze_first_layers(model, FREEZE, exact=args.fixed)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.RMSprop(trainable, lr=1e-3)
    before = model.layers[10].fc.weight.detach().clone()

    for epoch in range(1, args.epochs + 1):
        model.train()
        train_loss = run_epoch(model, train_loader, optimizer)
        model.eval()
        valid_loss = run_epoch(model, valid_loader)
        print(f"epoch {epoch} train loss {train_loss:.4f} valid loss {valid_loss:.4f}")

    change = (model.layers[10].fc.weight.detach() - before).abs().max().item()
    print(f"evidence: largest change of layers.10.fc.weight {change:.6f}")


if __name__ == "__main__":
    main()
