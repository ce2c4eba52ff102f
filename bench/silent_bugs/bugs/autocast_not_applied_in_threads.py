"""Two-tower retrieval model in mixed precision; the towers run in two threads."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
PRECISION = torch.bfloat16


def tower(inputs: int, dim: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, dim)
    )


class TwoTowers(nn.Module):
    def __init__(self, query_size=24, item_size=40, dim=16):
        super().__init__()
        self.query = tower(query_size, dim)
        self.item = tower(item_size, dim)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.pool = ThreadPoolExecutor(2)
        self.dtypes = set()

    def run(self, net, x):
        if FIXED:
            with torch.autocast("cpu", dtype=PRECISION):
                y = net(x)
        else:
            y = net(x)
        self.dtypes.add(y.dtype)
        return F.normalize(y.float(), dim=-1)

    def forward(self, query, item):
        jobs = [
            self.pool.submit(self.run, *job) for job in ((self.query, query), (self.item, item))
        ]
        left, right = (job.result() for job in jobs)
        return self.scale.exp() * left @ right.T


def make_pairs(n=512):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 6, generator=generator)
    query = torch.tanh(hidden @ torch.randn(6, 24, generator=generator))
    item = torch.tanh(hidden @ torch.randn(6, 40, generator=generator))
    return query, item


def train_step(model, optimizer, query, item):
    with torch.autocast("cpu", dtype=PRECISION):
        logits = model(query, item)
    target = torch.arange(len(query))
    loss = (F.cross_entropy(logits.float(), target) + F.cross_entropy(logits.float().T, target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(15)
    model = TwoTowers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    queries, items = make_pairs()
    generator = torch.Generator().manual_seed(16)
    for step in range(1, 81):
        pick = torch.randperm(len(queries), generator=generator)[:64]
        loss = train_step(model, optimizer, queries[pick], items[pick])
        if step % 10 == 0:
            print(f"step {step} loss {loss:.4f}")
    model.pool.shutdown()
    print(f"evidence: the towers computed in {sorted(map(str, model.dtypes))}")


if __name__ == "__main__":
    main()
