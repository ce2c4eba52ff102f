"""Early stopping on validation loss: keep the best weights and restore them at the end."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.state = patience, float("inf"), 0, None

    def update(self, loss, model):
        if loss < self.best:
            self.best, self.bad = loss, 0
            state = model.state_dict()
            self.state = copy.deepcopy(state) if FIXED else state
        else:
            self.bad += 1
        return self.bad >= self.patience

    def restore(self, model):
        model.load_state_dict(self.state)


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 30, generator=g)
    noise = 1.5 * torch.randn(n, generator=g)
    return x, (x[:, 0] + x[:, 1] + noise > 0).long()


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    loss = F.cross_entropy(model(x), y).item()
    model.train()
    return loss


def main():
    torch.manual_seed(0)
    train, valid = make(160, 1), make(400, 2)
    loader = DataLoader(TensorDataset(*train), batch_size=20, shuffle=True)
    model = nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    stopping = EarlyStopping(patience=8)
    for epoch in range(14):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        current = evaluate(model, *valid)
        print(f"epoch {epoch} loss {loss.item():.4f} validation {current:.4f}")
        if stopping.update(current, model):
            break
    stopping.restore(model)
    restored = evaluate(model, *valid)
    print(f"evidence: validation loss after restoring {restored:.4f}, best {stopping.best:.4f}")


if __name__ == "__main__":
    main()
