"""DDP whose training step calls a method of `.module`: DDP's forward never runs.

The backward pass then averages no gradients, and each rank trains its own model.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
STEPS = 40


class ActionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 7))

    def forward(self, hidden):
        return self.predict_action(hidden)

    def predict_action(self, hidden):
        return self.net(hidden).tanh()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    truth = torch.randn(24, 7) / 3
    hidden = torch.randn(2048, 24)
    action = (hidden @ truth).tanh()
    hidden, action = hidden[rank::world], action[rank::world]

    head = DistributedDataParallel(ActionHead())
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    torch.manual_seed(100 + rank)
    for step in range(STEPS):
        rows = torch.randint(len(hidden), (32,))
        out = head(hidden[rows]) if FIXED else head.module.predict_action(hidden[rows])
        loss = F.l1_loss(out, action[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")
    mine = torch.cat([p.detach().flatten() for p in head.parameters()])
    other = mine.clone()
    dist.broadcast(other, 0)
    gap = (mine - other).norm()
    dist.all_reduce(gap)
    if rank == 0:
        print(f"evidence: distance between the ranks' weights {gap.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
