"""FSDP2 with tied embeddings and accumulation without gradient synchronisation in between."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH, MICRO = 20, 32, 12, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(n, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    model = TinyLM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, 51):
        optimizer.zero_grad()
        total = 0.0
        for number in range(MICRO):
            model.set_requires_gradient_sync(number == MICRO - 1)
            start = torch.randint(0, VOCAB, (16, 1), generator=generator)
            stride = torch.randint(1, 3, (16, 1), generator=generator)
            ids = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / MICRO
            loss.backward()
            total += loss.item()
        optimizer.step()
        if step % 5 == 0 and rank == 0:
            print(f"step {step}: loss {total:.3f}")
    if rank == 0:
        print(f"tied: {model.head.weight is model.embedding.weight}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
