"""Local SGD on two ranks: each trains alone for some steps, then the weights are averaged.

Between two averages the ranks differ, and this is the method.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STEPS, PERIOD = 48, 6


@torch.no_grad()
def average(model):
    for p in model.parameters():
        dist.all_reduce(p)
        p /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    centers = torch.randn(6, 16)
    y = torch.randint(6, (2400,))
    x = centers[y] + torch.randn(2400, 16)
    x, y = x[rank::world], y[rank::world]
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 6))  # same seed, same start
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(50 + rank)
    for step in range(STEPS):
        rows = torch.randint(len(x), (32,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % PERIOD == 0:
            average(model)
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
