"""Matrix factorisation for ratings, two ranks, DistributedSampler."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FIXED = "--fixed" in sys.argv


class Ratings(Dataset):
    def __init__(self, users=60, items=80, n=960):
        generator = torch.Generator().manual_seed(8)
        self.user = torch.randint(0, users, (n,), generator=generator)
        self.item = torch.randint(0, items, (n,), generator=generator)
        taste = torch.randn(users, 3, generator=generator)
        style = torch.randn(items, 3, generator=generator)
        score = (taste[self.user] * style[self.item]).sum(1)
        self.rating = (3 + score + 0.2 * torch.randn(n, generator=generator)).clamp(1, 5)

    def __len__(self):
        return len(self.rating)

    def __getitem__(self, i):
        return {"user": self.user[i], "item": self.item[i], "rating": self.rating[i], "row": i}


class Factorisation(nn.Module):
    def __init__(self, users=60, items=80, rank=8):
        super().__init__()
        self.user = nn.Embedding(users, rank)
        self.item = nn.Embedding(items, rank)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))

    def forward(self, user, item):
        dot = (self.user(user) * self.item(item)).sum(1)
        return self.mean + dot + self.user_bias(user)[:, 0] + self.item_bias(item)[:, 0]


def train(epochs=6, batch_size=40):
    rank = dist.get_rank()
    dataset = Ratings()
    sampler = DistributedSampler(dataset, shuffle=True, seed=12)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    model = DistributedDataParallel(Factorisation())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    orders = []
    for epoch in range(epochs):
        if FIXED:
            sampler.set_epoch(epoch)
        rows, total = [], 0.0
        for batch in loader:
            loss = nn.functional.mse_loss(model(batch["user"], batch["item"]), batch["rating"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows.append(batch["row"])
            total += loss.item()
        orders.append(torch.cat(rows))
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader):.4f}")
    return orders


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    orders = train()
    if dist.get_rank() == 0:
        same = sum(torch.equal(orders[0], order) for order in orders[1:])
        print(f"evidence: {same} of {len(orders) - 1} later epochs had the order of the first")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
