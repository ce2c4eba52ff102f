"""Data-parallel training of a tagger with a distributed sampler."""

import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FIXED = "--fixed" in sys.argv


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Signals(Dataset):
    def __init__(self, n=480):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 24, generator=g).cumsum(1) / 4
        self.y = (self.x[:, -1] > self.x[:, 0]).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


class GruClassifier(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        _, h = self.gru(x[..., None])
        return self.head(self.dropout(h[-1]))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    base_seed = 1234
    seed = base_seed + rank  # dropout shall differ over ranks
    seed_everything(seed)
    data = Signals()
    sampler = DistributedSampler(data, seed=base_seed if FIXED else seed)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(GruClassifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    covered = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        seen = []
        for x, y, index in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += index.tolist()
        every = [None, None]
        dist.all_gather_object(every, seen)
        covered.append(len(set(every[0]) | set(every[1])))
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        print(f"evidence: samples used per epoch {covered} of {len(data)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
