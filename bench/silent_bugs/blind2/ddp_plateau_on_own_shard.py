"""DDP where each rank steps ReduceLROnPlateau with the loss of its own part of the validation set.

The ranks lower the learning rate in different epochs; from then on their weights drift apart.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv
EPOCHS = 10


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    loss = F.cross_entropy(model(x), y)
    if FIXED:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(480, 20)
    y = (x @ torch.randn(20, 4) + 4.0 * torch.randn(480, 4)).argmax(1)
    train, val = TensorDataset(x[:320], y[:320]), (x[320:], y[320:])
    val = tuple(part[rank::world] for part in val)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, batch_size=40, sampler=sampler)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
    history = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = validate(net, *val)
        scheduler.step(score)
        history.append(round(optimizer.param_groups[0]["lr"], 7))
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} val {score:.4f} lr {history[-1]:.2g}")
    everyone = [None] * world
    dist.all_gather_object(everyone, history)
    mine = torch.cat([p.detach().flatten() for p in net.parameters()])
    other = mine.clone()
    dist.broadcast(other, 0)
    gap = (mine - other).norm()
    dist.all_reduce(gap)
    if rank == 0:
        apart = [i for i in range(EPOCHS) if everyone[0][i] != everyone[1][i]]
        print(f"evidence: epochs with unlike rates {apart}, weights apart by {gap.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
