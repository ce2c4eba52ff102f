"""Data-parallel training of a small CNN."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    return parser.parse_args()


def dataset(n=512):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = 0.6 * torch.randn(n, 1, 8, 8, generator=g)
    x[:, 0, 0] += y[:, None]
    return TensorDataset(x, y, torch.arange(n))


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    data = dataset()
    if args.fixed:
        sampler = DistributedSampler(data, shuffle=True)
        loader = DataLoader(data, args.batch, sampler=sampler)
    else:
        sampler = None
        loader = DataLoader(data, args.batch, shuffle=True)
    model = DistributedDataParallel(
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    common = total = 0
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for i, (x, y, index) in enumerate(loader):
            if i == len(data) // (args.batch * world):
                break
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            both = [torch.empty_like(index) for _ in range(world)]
            dist.all_gather(both, index)
            common += len(set(both[0].tolist()) & set(both[1].tolist()))
            total += args.batch
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        print(f"evidence: samples that both ranks used in one step {common} of {total}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
