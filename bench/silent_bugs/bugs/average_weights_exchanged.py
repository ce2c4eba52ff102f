"""Self-distillation: a student follows a slowly moving average of itself."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
MOMENTUM = 0.99


class Encoder(nn.Module):
    def __init__(self, features=20, width=48, dim=12):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(features, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, dim)
        )

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


@torch.no_grad()
def update_teacher(teacher: nn.Module, student: nn.Module):
    weight = 1 - MOMENTUM if FIXED else MOMENTUM
    for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
        t.lerp_(s, weight)


def augment(x, generator):
    keep = torch.rand(x.shape, generator=generator) > 0.2
    return x * keep + 0.1 * torch.randn(x.shape, generator=generator)


def main():
    torch.manual_seed(9)
    generator = torch.Generator().manual_seed(10)
    student = Encoder()
    predictor = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
    teacher = copy.deepcopy(student).requires_grad_(False)
    start = copy.deepcopy(student.net[0].weight.detach())
    optimizer = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=2e-3)
    basis = torch.randn(5, 20, generator=generator)
    for step in range(1, 101):
        x = torch.randn(64, 5, generator=generator) @ basis
        prediction = F.normalize(predictor(student(augment(x, generator))), dim=-1)
        with torch.no_grad():
            target = teacher(augment(x, generator))
        loss = 2 - 2 * (prediction * target).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_teacher(teacher, student)
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")

    moved = (teacher.net[0].weight - start).norm() / (student.net[0].weight - start).norm()
    print(f"evidence: the teacher went {100 * moved.item():.1f} % of the student's way")


if __name__ == "__main__":
    main()
