"""DDP on two ranks: DistributedSampler with set_epoch, BatchNorm buffers from rank 0."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12 * 16, 5)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1))


def images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 5, (n,), generator=generator)
    return TensorDataset(prototypes[y] + 1.2 * torch.randn(n, 1, 8, 8, generator=generator), y)


def evaluate(model, data, rank, world):
    model.eval()
    x, y = (tensor[rank::world] for tensor in data.tensors)
    with torch.no_grad():
        counts = torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP broadcasts the weights of rank 0
    train, test = images(800, 1), images(300, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 6 == 0 and rank == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        accuracy = evaluate(model, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
