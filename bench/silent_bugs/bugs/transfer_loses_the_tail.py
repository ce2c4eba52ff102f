"""Start all ranks from rank 0's weights, sent in chunks, then train with averaged gradients."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
CHUNK = 1024


class Siamese(nn.Module):
    """Says whether two patterns are the same up to a shift."""

    def __init__(self, length=16, width=40):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(length, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.score = nn.Linear(width, 1)

    def forward(self, a, b):
        return self.score((self.trunk(a) - self.trunk(b)).abs()).squeeze(-1)


def sample(generator, size=32, length=16):
    a = torch.randn(size, length, generator=generator)
    other = torch.randn(size, length, generator=generator)
    same = torch.rand(size, generator=generator) < 0.5
    b = torch.where(same[:, None], a.roll(1, dims=1), other)
    return a, b, same.float()


def send_weights(model: nn.Module):
    """Copy rank 0's weights to all ranks through a staging buffer."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    staging = torch.empty(CHUNK)
    stop = len(flat) if FIXED else len(flat) // CHUNK * CHUNK
    for start in range(0, stop, CHUNK):
        part = flat[start : start + CHUNK]
        staging[: len(part)] = part
        dist.broadcast(staging, src=0)
        part.copy_(staging[: len(part)])
    nn.utils.vector_to_parameters(flat, model.parameters())


def average_gradients(model: nn.Module):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(80 + rank)
    model = Siamese()
    send_weights(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(90 + rank)
    for step in range(1, 71):
        a, b, same = sample(generator)
        loss = F.binary_cross_entropy_with_logits(model(a, b), same)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}")

    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    first = weights.clone()
    dist.broadcast(first, src=0)
    different = (weights != first).sum()
    dist.all_reduce(different, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"evidence: {different.item()} of {len(weights)} weights differ over ranks")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
