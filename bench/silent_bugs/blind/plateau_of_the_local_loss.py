"""Data-parallel training with a learning rate that falls on plateaus."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    y = torch.sin(x[:, :4]).sum(1, keepdim=True) + 0.5 * torch.randn(n, 1, generator=g)
    return TensorDataset(x, y)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total = torch.zeros(2)
    for x, y in loader:
        total += torch.tensor([nn.functional.mse_loss(model(x), y, reduction="sum"), len(x)])
    model.train()
    if FIXED:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    model = DistributedDataParallel(net)
    train, valid = make_data(256, 1), make_data(48, 2)
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    valid_loader = DataLoader(
        valid, batch_size=16, sampler=DistributedSampler(valid, shuffle=False)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
    apart = 0.0
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        current = validate(model.module, valid_loader)
        scheduler.step(current)
        rates = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(rates, torch.tensor([optimizer.param_groups[0]["lr"]]))
        ratio = (rates[0] / rates[1]).log().abs().exp().item()
        apart = max(apart, ratio)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} validation {current:.4f}", flush=True)
    if rank == 0:
        print(f"evidence: learning rates of the ranks apart by a factor {apart:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
