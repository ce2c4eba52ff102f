"""Distil a trained teacher into a small student."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
TEMPERATURE, ALPHA, CLASSES = 2.0, 0.9, 6


def net(width):
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, CLASSES))


def data(n, generator):
    x = torch.randn(n, 12, generator=generator)
    w = torch.randn(12, CLASSES, generator=torch.Generator().manual_seed(11))
    return x, (x @ w).argmax(1)


def distillation_loss(student, teacher):
    target = F.softmax(teacher / TEMPERATURE, dim=-1)
    if FIXED:
        prediction = F.log_softmax(student / TEMPERATURE, dim=-1)
    else:
        prediction = F.softmax(student / TEMPERATURE, dim=-1)
    return F.kl_div(prediction, target, reduction="batchmean") * TEMPERATURE**2


def train_teacher(generator):
    teacher = net(96)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for _ in range(60):
        x, y = data(128, generator)
        loss = F.cross_entropy(teacher(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher.requires_grad_(False).eval()


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    teacher = train_teacher(generator)
    student = net(24)
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.3)
    for step in range(1, 61):
        x, y = data(64, generator)
        with torch.no_grad():
            soft = teacher(x)
        logits = student(x)
        loss = ALPHA * distillation_loss(logits, soft) + (1 - ALPHA) * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    x, _ = data(512, generator)
    with torch.no_grad():
        gap = F.kl_div(student(x).log_softmax(-1), teacher(x).softmax(-1), reduction="batchmean")
    print(f"evidence: divergence from teacher {gap.item():.4f}, last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
