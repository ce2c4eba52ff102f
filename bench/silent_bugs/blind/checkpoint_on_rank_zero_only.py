"""Continue data-parallel training from a checkpoint."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 5))
        self.decoder = nn.Sequential(nn.Linear(5, 32), nn.GELU(), nn.Linear(32, 20))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def batch(generator):
    basis = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    return torch.randn(32, 5, generator=generator) @ basis


def make_checkpoint(path):
    torch.manual_seed(42)
    model = Autoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(2)
    for _ in range(30):
        x = batch(generator)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = Path(tempfile.gettempdir()) / f"autoencoder_{os.environ['MASTER_PORT']}.pt"
    if rank == 0:
        make_checkpoint(path)
    dist.barrier()
    torch.manual_seed(0)
    model = DistributedDataParallel(Autoencoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0 or FIXED:
        checkpoint = torch.load(path)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        print(f"rank {rank} continues from {path.name}", flush=True)
    dist.barrier()
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(1, 51):
        x = batch(generator)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    weight = model.module.encoder[0].weight.detach()
    both = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(both, weight)
    if rank == 0:
        path.unlink()
        gap = (both[0] - both[1]).abs().max().item()
        print(f"evidence: weights of the ranks differ by {gap:.5f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
