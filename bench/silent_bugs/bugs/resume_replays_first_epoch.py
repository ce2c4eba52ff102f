"""Trains an MLP, is interrupted in the third epoch, and continues from the checkpoint."""

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv


class Spirals(Dataset):
    def __init__(self, n=400):
        generator = torch.Generator().manual_seed(3)
        self.label = torch.arange(n) % 2
        t = torch.rand(n, generator=generator) * 2.2 + 0.3
        angle = t * 3 + self.label * torch.pi
        points = torch.stack([t * angle.cos(), t * angle.sin()], 1)
        self.points = points + 0.05 * torch.randn(n, 2, generator=generator)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        return self.points[index], self.label[index], index


@dataclass
class Run:
    """Everything that one process builds, fresh or from a checkpoint."""

    seed: int = 13
    epoch: int = 0
    step: int = 0
    orders: list = field(default_factory=list)

    def __post_init__(self):
        torch.manual_seed(self.seed)
        self.model = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.model.append(nn.Linear(48, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.loader = DataLoader(Spirals(), batch_size=25, shuffle=True, generator=self.generator)

    def save(self, path):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "epoch": self.epoch,
                "step": self.step,
                "rng": torch.get_rng_state(),
                "loader_rng": self.generator.get_state(),
            },
            path,
        )

    def load(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.step = state["epoch"], state["step"]
        torch.set_rng_state(state["rng"])
        if FIXED:
            self.generator.set_state(state["loader_rng"])

    def train_epoch(self):
        order, total = [], 0.0
        for points, labels, index in self.loader:
            loss = nn.functional.cross_entropy(self.model(points), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            total += loss.item()
            order.append(index)
        self.orders.append(torch.cat(order))
        print(f"epoch {self.epoch} step {self.step} loss {total / len(self.loader):.4f}")
        self.epoch += 1


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        first = Run()
        for _ in range(3):
            first.train_epoch()
        first.save(path)
        second = Run()
        second.load(path)
        print(f"resumed at epoch {second.epoch}")
        for _ in range(3):
            second.train_epoch()

    same = sum(torch.equal(a, b) for a, b in zip(first.orders, second.orders, strict=True))
    print(f"evidence: {same} of 3 epochs after resuming have the order of an earlier epoch")


if __name__ == "__main__":
    main()
