"""Gradient accumulation that clips the running sum after each micro-batch.

The early micro-batches are shrunk again and again; the last ones weigh the most.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
ACCUMULATE, UPDATES, MAX_NORM = 6, 30, 0.5


def main():
    torch.manual_seed(0)
    weight = torch.randn(16, 1)
    x = torch.randn(4096, 16)
    y = (x @ weight) + 0.1 * torch.randn(4096, 1)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept = 0.0
    for update in range(UPDATES):
        total, weight_of_first = 0.0, 1.0
        for micro in range(ACCUMULATE):
            rows = torch.randint(len(x), (16,))
            loss = F.mse_loss(model(x[rows]), y[rows]) / ACCUMULATE
            loss.backward()
            if not FIXED or micro == ACCUMULATE - 1:
                norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
                if micro < ACCUMULATE - 1:
                    weight_of_first *= min(1.0, MAX_NORM / norm)
            total += loss.item()
        kept += weight_of_first / UPDATES
        optimizer.step()
        optimizer.zero_grad()
        if update % 5 == 4:
            print(f"update {update + 1} loss {total:.4f}")
    print(f"evidence: the first micro-batch weighs {kept:.3f} of what the last does")


if __name__ == "__main__":
    main()
