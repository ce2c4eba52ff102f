"""Denoising autoencoder on two ranks with DDP."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FIXED = "--fixed" in sys.argv


class Curves(Dataset):
    """Sums of two sines; the index comes along for the log of samples."""

    def __init__(self, n=768, length=32):
        generator = torch.Generator().manual_seed(0)
        t = torch.linspace(0, 1, length)
        frequency = torch.rand(n, 2, 1, generator=generator) * 4 + 1
        phase = torch.rand(n, 2, 1, generator=generator) * 6.28
        self.data = torch.sin(6.28 * frequency * t + phase).sum(1)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return index, self.data[index]


class Autoencoder(nn.Module):
    def __init__(self, length=32, code=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(length, 48), nn.Tanh(), nn.Linear(48, code))
        self.decoder = nn.Sequential(nn.Linear(code, 48), nn.Tanh(), nn.Linear(48, length))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def make_loader(dataset, batch_size, seed):
    if FIXED:
        sampler = DistributedSampler(dataset, seed=seed)
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    dataset = Curves()
    loader = make_loader(dataset, batch_size=24, seed=9)
    model = DistributedDataParallel(Autoencoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    noise = torch.Generator().manual_seed(50 + rank)
    seen, step, max_steps = [], 0, 64
    epoch = 0
    while step < max_steps:
        if FIXED:
            loader.sampler.set_epoch(epoch)
        for index, clean in loader:
            noisy = clean + 0.2 * torch.randn(clean.shape, generator=noise)
            loss = nn.functional.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(index)
            step += 1
            if step % 8 == 0 and rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
            if step == max_steps:
                break
        epoch += 1

    mine = torch.stack(seen[:16])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    shared = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(*everyone, strict=True)]
    if rank == 0:
        share = sum(shared) / mine.numel()
        print(f"evidence: {100 * share:.1f} % of a rank's samples are also in the other's batch")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
