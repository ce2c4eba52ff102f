"""Two-stage fine-tuning: train the head, then everything with a new optimizer and a cosine."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.backbone(x))


class Trainer:
    def __init__(self, model, loader, steps):
        self.model, self.loader, self.steps = model, loader, steps
        self.step = 0
        self.optimizer = AdamW(model.head.parameters(), lr=1e-2)
        self.scheduler = CosineAnnealingLR(self.optimizer, steps)

    def unfreeze(self, lr):
        self.model.backbone.requires_grad_(True)
        self.optimizer = SGD(self.model.parameters(), lr=lr, momentum=0.9)
        if FIXED:
            self.scheduler = CosineAnnealingLR(self.optimizer, self.steps - self.step)

    def epoch(self):
        for x, y in self.loader:
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            if self.step % 8 == 0:
                print(f"step {self.step} loss {loss.item():.4f}")


def main():
    torch.manual_seed(0)
    x = torch.randn(512, 20)
    y = (x @ torch.randn(20, 5)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = Classifier()
    model.backbone.requires_grad_(False)
    trainer = Trainer(model, loader, steps=5 * len(loader))
    for epoch in range(5):
        if epoch == 2:
            trainer.unfreeze(lr=0.05)
        trainer.epoch()
    lr = trainer.optimizer.param_groups[0]["lr"]
    print(f"evidence: learning rate after the last step of the cosine {lr:.5f}")


if __name__ == "__main__":
    main()
