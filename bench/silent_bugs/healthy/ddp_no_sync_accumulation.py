"""DDP with gradient accumulation: no_sync for all micro-batches but the last."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE, STEPS = 3, 60


class CharModel(nn.Module):
    def __init__(self, vocab=15, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.gru = nn.GRU(width, 48, batch_first=True)
        self.out = nn.Linear(48, vocab)

    def forward(self, ids):
        return self.out(self.gru(self.embedding(ids))[0])


def micro_batch(generator, n=16, length=12, vocab=15):
    start = torch.randint(0, vocab, (n, 1), generator=generator)
    stride = torch.randint(1, 3, (n, 1), generator=generator)
    ids = (start + stride * torch.arange(length + 1)) % vocab
    return ids[:, :-1], ids[:, 1:]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(100 + rank)  # data of its own for each rank
    model = DistributedDataParallel(CharModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        total = 0.0
        for number in range(ACCUMULATE):
            last = number == ACCUMULATE - 1
            x, y = micro_batch(generator)
            with nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(x).transpose(1, 2), y) / ACCUMULATE
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: loss {total:.3f}")
    checksum = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    sums = [torch.zeros_like(checksum) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, checksum)
    if rank == 0:
        print(f"replicas equal: {all(s == sums[0] for s in sums)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
