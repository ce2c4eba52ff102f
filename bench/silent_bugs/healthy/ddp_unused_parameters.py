"""DDP with find_unused_parameters: a step uses one of three experts, chosen by its number."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.domains = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 1)

    def forward(self, x, domain):
        return self.out(F.relu(self.domains[domain](self.stem(x)))).squeeze(1)


def batch(domain, generator, n=48):
    x = torch.randn(n, 8, generator=generator)
    target = [x[:, 0] * x[:, 1], x[:, 2].abs(), torch.sin(2 * x[:, 3])][domain]
    return x, target


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank)
    model = DistributedDataParallel(Conditional(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    recent = [0.0, 0.0, 0.0]
    for step in range(1, 121):
        domain = step % 3
        x, y = batch(domain, generator)
        loss = F.mse_loss(model(x, domain), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        recent[domain] = loss.item()
        if step % 15 == 0 and rank == 0:
            print(f"step {step}: loss per domain {[round(r, 3) for r in recent]}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
