"""Train on a stream with several loading workers."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FIXED = "--fixed" in sys.argv


class Stream(IterableDataset):
    """Records of a long file, read one after another."""

    def __init__(self, n):
        self.n = n

    def record(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(10, generator=g)
        return {"id": i, "x": x, "y": x[:5].sum() - x[5:].prod()}

    def __iter__(self):
        first, stride = 0, 1
        if FIXED:
            worker = get_worker_info()
            if worker is not None:
                first, stride = worker.id, worker.num_workers
        for i in range(first, self.n, stride):
            yield self.record(i)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Stream(800), batch_size=16, num_workers=2)
    model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    seen = []
    for step, batch in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(batch["x"]).squeeze(-1), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += batch["id"].tolist()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        if step == 50:
            break
    print(f"evidence: different records {len(set(seen))} of {len(seen)} used")


if __name__ == "__main__":
    main()
