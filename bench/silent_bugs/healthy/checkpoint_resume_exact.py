"""Train, save, make everything anew, load, go on: equal to a run without interruption."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def dataset():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(640, 10, generator=generator)
    return TensorDataset(x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).long())


class Run:
    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=60)
        self.epoch, self.step = 0, 0

    def train_epoch(self, data):
        order = torch.Generator().manual_seed(1000 + self.epoch)
        loader = DataLoader(data, batch_size=64, shuffle=True, generator=order)
        self.model.train()
        for x, y in loader:
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
        self.epoch += 1
        print(f"epoch {self.epoch} step {self.step}: loss {loss.item():.4f}")

    def save(self, path):
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": self.epoch,
            "step": self.step,
        }
        torch.save(state, path)

    def load(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self.step = state["epoch"], state["step"]
        torch.set_rng_state(state["rng"])


def main():
    data = dataset()
    whole = Run()
    for _ in range(6):
        whole.train_epoch(data)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        first = Run()
        for _ in range(3):
            first.train_epoch(data)
        first.save(path)
        second = Run(seed=99)
        second.load(path)
    for _ in range(3):
        second.train_epoch(data)
    pairs = zip(whole.model.parameters(), second.model.parameters(), strict=True)
    print(f"equal: {all(torch.equal(a, b) for a, b in pairs)}")


if __name__ == "__main__":
    main()
