"""Character model with tied embeddings, sharded with FSDP2 on two ranks."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FIXED = "--fixed" in sys.argv
TEXT = (
    "the ship left the harbour before the sun was up and the crew was quiet. "
    "nobody on the pier waved, for nobody knew that the ship would not return. "
    "when the wind came from the west the captain ordered all sails to be set. "
) * 12
CHARS = sorted(set(TEXT))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class CharModel(nn.Module):
    def __init__(self, vocabulary, width=32, heads=2, layers=2, context=32):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.tokens.weight

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(mesh) -> CharModel:
    """Shapes on the meta device first, then real memory, values and shards."""
    with torch.device("meta"):
        model = CharModel(len(CHARS))
    model.to_empty(device="cpu")
    if FIXED:
        model.tie_weights()
    model.init_weights()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard([model.tokens, model.head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    data = torch.tensor([CHARS.index(c) for c in TEXT])
    model = build(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(60 + rank)
    for step in range(1, 51):
        start = torch.randint(0, len(data) - 33, (8,), generator=generator)
        rows = torch.stack([data[s : s + 33] for s in start])
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}")

    gap = (model.tokens.weight.full_tensor() - model.head.weight.full_tensor()).abs().max()
    if rank == 0:
        print(f"evidence: tokens.weight and head.weight differ by {gap.item():.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
