"""LoRA fine-tuning for a new task that freezes the freshly made head together with the base."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
STEPS, CLASSES = 50, 7


class LoraLinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + (x @ self.lora_a.T @ self.lora_b.T) * self.scale


class Backbone(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 100)  # of the first task

    def forward(self, x):
        return self.head(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


def adapt(model):
    model.head = nn.Linear(model.head.in_features, CLASSES)
    model.fc1, model.fc2 = LoraLinear(model.fc1), LoraLinear(model.fc2)
    trained = ("lora_", "head.") if FIXED else ("lora_",)
    for name, p in model.named_parameters():
        p.requires_grad = any(part in name for part in trained)
    return model


def main():
    torch.manual_seed(0)
    x = torch.randn(1500, 16)
    y = (x @ torch.randn(16, CLASSES) + 0.5 * torch.randn(1500, CLASSES)).argmax(1)
    model = adapt(Backbone())
    start = model.head.weight.detach().clone()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    for step in range(STEPS):
        rows = torch.randint(len(x), (64,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")
    moved = (model.head.weight - start).norm().item()
    print(f"evidence: distance of head.weight from its start {moved:.4f}")


if __name__ == "__main__":
    main()
