"""Contrastive pre-training on noisy crops; two workers make the crops."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

FIXED = "--fixed" in sys.argv
SEED = 5


class TwoCrops(Dataset):
    """Two noisy crops of a long signal, and the offsets that were drawn."""

    def __init__(self, n=480, length=64, crop=32):
        rng = np.random.default_rng(0)
        steps = rng.normal(size=(n, length)).astype(np.float32)
        self.signals = np.cumsum(steps, axis=1) / 4
        self.crop = crop
        self.rng = np.random.default_rng(SEED)

    def __len__(self):
        return len(self.signals)

    def view(self, signal):
        start = int(self.rng.integers(0, len(signal) - self.crop))
        noise = self.rng.normal(scale=0.3, size=self.crop).astype(np.float32)
        return signal[start : start + self.crop] + noise, noise[0]

    def __getitem__(self, index):
        first, a = self.view(self.signals[index])
        second, b = self.view(self.signals[index])
        return first, second, np.array([a, b])


def init_worker(worker_id):
    info = get_worker_info()
    if FIXED:
        info.dataset.rng = np.random.default_rng([SEED, info.seed % 2**32, worker_id])


class Encoder(nn.Module):
    def __init__(self, crop=32, width=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(crop, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, width)
        )

    def forward(self, x):
        return F.normalize(self.body(x), dim=1)


def info_nce(a, b, temperature=0.2):
    return F.cross_entropy(a @ b.T / temperature, torch.arange(len(a)))


def main():
    torch.manual_seed(SEED)
    loader = DataLoader(
        TwoCrops(),
        batch_size=24,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=init_worker,
    )
    encoder = Encoder()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    draws, step = [], 0
    for epoch in range(3):
        for first, second, drawn in loader:
            loss = info_nce(encoder(first), encoder(second))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            draws.append(drawn.flatten())
            step += 1
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")

    values = torch.cat(draws)
    repeated = 1 - len(values.unique()) / len(values)
    print(f"evidence: {100 * repeated:.1f} % of the random numbers were drawn more than once")


if __name__ == "__main__":
    main()
