"""A small encoder with FSDP2 on two ranks, gradient clipping written by hand."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FIXED = "--fixed" in sys.argv
STEPS, BATCH, LENGTH, VOCABULARY, MAX_NORM = 50, 12, 16, 20, 0.3


class Layer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x):
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm(x))


class Encoder(nn.Module):
    """Predicts how many of the tokens are small."""

    def __init__(self, width=32, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 6)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    if FIXED:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return norm.full_tensor().item()
    shards = [p.grad.to_local() for p in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(s) for s in shards]))
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for shard in shards:
        shard.mul_(scale)
    return norm.item()


def sample_batch(generator):
    tokens = torch.randint(0, VOCABULARY // 2, (BATCH, LENGTH), generator=generator)
    return tokens, (tokens < 2).sum(1).clamp(max=5)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Encoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(10 + rank)
    norms = []
    for step in range(1, STEPS + 1):
        tokens, target = sample_batch(generator)
        loss = F.cross_entropy(model(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        norms.append(clip_gradients(model, MAX_NORM))
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f} grad norm {norms[-1]:.4f}")

    used = torch.tensor(norms)
    both = [torch.empty_like(used) for _ in range(dist.get_world_size())]
    dist.all_gather(both, used)
    if rank == 0:
        gap = (both[0] - both[1]).abs().mean().item()
        print(f"evidence: norms that the ranks clipped with differ by {gap:.6f} on average")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
