"""Sensor classification with batch normalisation: each rank reads the files of one site."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
EPOCHS, BATCH = 5, 32


def read_site(site: int, n: int = 448) -> TensorDataset:
    """Three channels, 24 readings; the sites' sensors have different offsets."""
    generator = torch.Generator().manual_seed(40 + site)
    labels = torch.randint(0, 4, (n,), generator=generator)
    t = torch.arange(24.0)
    signal = torch.sin(t * (0.3 + 0.25 * labels[:, None]))
    channels = torch.stack([signal, signal.roll(3, 1), -signal], 1)
    noise = torch.randn(channels.shape, generator=generator)
    return TensorDataset(channels + 0.5 * noise + 0.6 * site, labels)


def build_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(3, 16, 5, padding=2, bias=False),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Conv1d(16, 24, 5, stride=2, bias=False),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


@torch.no_grad()
def evaluate(model, dataset):
    """Mean accuracy; every rank takes its own site."""
    model.eval()
    x, y = dataset.tensors
    accuracy = (model(x).argmax(1) == y).float().mean()
    dist.all_reduce(accuracy)
    model.train()
    return accuracy.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    train_set = read_site(rank)
    loader = DataLoader(
        train_set,
        batch_size=BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(rank),
    )
    model = DistributedDataParallel(build_model(), forward_sync_buffers=FIXED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for epoch in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 7 == 0 and rank == 0:
                print(f"epoch {epoch} batch {i} loss {loss.item():.4f}")
        accuracy = evaluate(model, train_set)
        if rank == 0:
            print(f"epoch {epoch} accuracy {accuracy:.3f}")

    mean = model.module[1].running_mean
    gathered = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mean)
    if rank == 0:
        gap = (gathered[0] - gathered[1]).abs().max().item()
        print(f"evidence: running means used in evaluation differ over ranks by {gap:.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
