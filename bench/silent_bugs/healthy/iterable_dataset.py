"""A stream: an IterableDataset with a shuffle buffer and a state that differs in each epoch."""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, n, buffer=64):
        self.n, self.buffer, self.epoch = n, buffer, 0

    def records(self):
        for number in range(self.n):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(6, generator=generator)
            yield x, (x[:3] * x[3:]).sum()

    def __iter__(self):
        order = random.Random(self.epoch)
        self.epoch += 1
        held = []
        for record in self.records():
            if len(held) < self.buffer:
                held.append(record)
                continue
            place = order.randrange(self.buffer)
            yield held[place]
            held[place] = record
        order.shuffle(held)
        yield from held


def main():
    torch.manual_seed(0)
    loader = DataLoader(Stream(900), batch_size=50)
    model = nn.Sequential(
        nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1), nn.Flatten(0)
    )
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)
    for epoch in range(6):
        for step, (x, y) in enumerate(loader):
            loss = F.huber_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 6 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
