"""Distillation where the teacher is a submodule, and `train()` turns its dropout on as well."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
EPOCHS, STEPS, TEMPERATURE = 5, 8, 2.0


def classifier(hidden, dropout):
    return nn.Sequential(
        nn.Linear(24, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10)
    )


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = classifier(128, 0.5)
        with torch.no_grad():  # stands for trained weights
            for p in self.teacher.parameters():
                p.mul_(3.0)
        self.teacher.eval().requires_grad_(False)
        self.student = classifier(32, 0.0)

    def forward(self, x):
        with torch.no_grad():
            target = F.softmax(self.teacher(x) / TEMPERATURE, dim=-1)
        logp = F.log_softmax(self.student(x) / TEMPERATURE, dim=-1)
        return F.kl_div(logp, target, reduction="batchmean") * TEMPERATURE**2


@torch.no_grad()
def agreement(distiller, x):
    distiller.eval()
    return (distiller.student(x).argmax(1) == distiller.teacher(x).argmax(1)).float().mean().item()


def main():
    torch.manual_seed(0)
    data, held_out = torch.randn(1024, 24), torch.randn(512, 24)
    distiller = Distiller()
    optimizer = torch.optim.Adam(distiller.student.parameters(), lr=5e-3)
    for epoch in range(EPOCHS):
        distiller.train()
        if FIXED:
            distiller.teacher.eval()
        for _ in range(STEPS):
            loss = distiller(data[torch.randint(len(data), (128,))])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f} agree {agreement(distiller, held_out):.3f}")
    distiller.train()
    if FIXED:
        distiller.teacher.eval()
    with torch.no_grad():
        change = (distiller.teacher(held_out) - distiller.teacher(held_out)).abs().mean().item()
    print(f"evidence: two targets for the same input differ by {change:.4f}")


if __name__ == "__main__":
    main()
