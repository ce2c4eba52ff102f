"""Data-parallel classifier with Accelerate and a linear schedule."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(20, 64)
        self.fc2 = nn.Linear(64, 64)
        self.out = nn.Linear(64, 4)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        return self.out(F.relu(self.fc2(x)))


def schedule(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (total - step) / (total - warmup))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(23)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(960, 20)
    y = (x @ torch.randn(20, 4)).argmax(dim=1)
    loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    total = args.epochs * len(loader)
    scheduler = schedule(optimizer.optimizer, warmup=8, total=total)
    if not args.fixed:
        scheduler = accelerator.prepare(scheduler)

    used = []
    for epoch in range(args.epochs):
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            accelerator.backward(loss)
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            if len(used) % 10 == 0:
                accelerator.print(f"step {len(used)} loss {loss.item():.4f} lr {used[-1]:.5f}")
        accelerator.print(f"epoch {epoch} done")

    idle = sum(lr == 0 for lr in used)
    accelerator.print(f"evidence: {idle} of {len(used)} optimizer steps with lr 0")
    accelerator.end_training()


if __name__ == "__main__":
    main()
