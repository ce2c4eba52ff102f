"""FSDP2 on two ranks: each block sharded, clipping of the whole norm, a full state dict."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=33):  # an odd width: shards differ in size
        super().__init__()
        self.stem = nn.Linear(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(centres, generator, n=32):
    y = torch.randint(0, 4, (n,), generator=generator)
    return centres[y] + torch.randn(n, 10, generator=generator), y


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    centres = torch.randn(4, 10)
    mesh = init_device_mesh("cpu", (world,))
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(1, 61):
        x, y = batch(centres, generator)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, norm {norm.item():.3f}")
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        plain = Net()
        plain.load_state_dict(state)
        x, y = batch(centres, generator, 400)
        with torch.no_grad():
            print(f"accuracy {(plain.eval()(x).argmax(1) == y).float().mean():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
