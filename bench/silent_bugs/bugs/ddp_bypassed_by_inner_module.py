"""Image classification with DistributedDataParallel on two ranks."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv
EPOCHS = 4
BATCH = 16


class SmallConvNet(nn.Module):
    def __init__(self, classes: int = 5):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(64, classes)

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))

    @torch.no_grad()
    def predict(self, images):
        return self(images).argmax(1)


def make_dataset(n: int, seed: int) -> TensorDataset:
    """Stripes whose direction and frequency depend on the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (n,), generator=generator)
    grid = torch.arange(12.0)
    rows, columns = torch.meshgrid(grid, grid, indexing="ij")
    angle = labels.float()[:, None, None] * 0.6
    wave = torch.sin(0.9 * (rows * torch.cos(angle) + columns * torch.sin(angle)))
    images = wave + 0.6 * torch.randn(n, 12, 12, generator=generator)
    return TensorDataset(images.unsqueeze(1), labels)


def train_epoch(model, loader, optimizer, epoch, rank):
    net = model if FIXED else model.module
    net.train()
    for i, (images, labels) in enumerate(loader):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        if i % 8 == 0 and rank == 0:
            print(f"epoch {epoch}  batch {i:2d}  loss {loss.item():.4f}")


def accuracy(net: SmallConvNet, dataset: TensorDataset) -> float:
    images, labels = dataset.tensors
    net.eval()
    return (net.predict(images) == labels).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_set, test_set = make_dataset(640, seed=1), make_dataset(200, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=5)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(SmallConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, epoch, rank)
        if rank == 0:
            print(f"epoch {epoch}  accuracy {accuracy(model.module, test_set):.3f}")

    weight = model.module.classifier.weight.detach().clone()
    other = weight.clone()
    dist.broadcast(other, src=0)
    difference = (weight - other).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"evidence: classifier weights differ over ranks by {difference.item():.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
