"""Two-tower matching of queries and items."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tower(nn.Module):
    def __init__(self, inputs, dim=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 48), nn.ReLU(), nn.Linear(48, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class Matcher(nn.Module):
    def __init__(self, query_inputs, item_inputs):
        super().__init__()
        self.query_tower = Tower(query_inputs)
        self.item_tower = Tower(item_inputs)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, queries, items):
        q = self.query_tower(queries)
        i = self.item_tower(items)
        return q, i


class Monitor:
    """Keeps the last embeddings for the report of each epoch."""

    def __init__(self):
        self.kept = None

    def keep(self, embeddings):
        self.kept = embeddings.detach()
        return self.kept

    def spread(self):
        return self.kept.std(dim=0).mean().item()


def contrastive(q, i, temperature):
    logits = q @ i.t() * temperature.exp()
    target = torch.arange(len(q))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(60)

    hidden = torch.randn(768, 6)
    queries = hidden @ torch.randn(6, 20) + 0.2 * torch.randn(768, 20)
    items = torch.tanh(hidden @ torch.randn(6, 30)) + 0.2 * torch.randn(768, 30)
    loader = DataLoader(TensorDataset(queries, items), batch_size=48, shuffle=True)
    model = Matcher(20, 30)
    monitor = Monitor()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    before = model.item_tower.net[0].weight.detach().clone()

    step = 0
    for epoch in range(args.epochs):
        for query_batch, item_batch in loader:
            q, i = model(query_batch, item_batch)
            if args.fixed:
                monitor.keep(i)
            else:
                i = monitor.keep(i)
            loss = contrastive(q, i, model.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}")
        print(f"epoch {epoch} spread of the items {monitor.spread():.4f}")

    change = (model.item_tower.net[0].weight.detach() - before).abs().max().item()
    print(f"evidence: largest change of the item tower's first layer {change:.6f}")


if __name__ == "__main__":
    main()
