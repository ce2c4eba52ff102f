"""ReduceLROnPlateau with early stopping and a return to the best weights."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(6, 6, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, a, b):
        return self.out(torch.tanh(self.bilinear(a, b))).squeeze(-1)


def data(n):
    a, b = torch.randn(n, 6), torch.randn(n, 6)
    return TensorDataset(a, b, torch.tanh((a * b).sum(1)) + 0.2 * torch.randn(n))


def validate(model, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for a, b, y in loader:
            total += F.mse_loss(model(a, b), y, reduction="sum").item()
    model.train()
    return total / len(loader.dataset)


def main():
    torch.manual_seed(0)
    train = DataLoader(data(500), batch_size=64, shuffle=True)
    val = DataLoader(data(300), batch_size=100)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    best, best_state, bad = float("inf"), None, 0
    for epoch in range(14):
        for a, b, y in train:
            loss = F.mse_loss(model(a, b), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = validate(model, val)
        plateau.step(score)
        print(f"epoch {epoch}: loss {loss.item():.3f}, val {score:.4f}, lr {plateau.get_last_lr()}")
        if score < best:
            best, best_state, bad = score, copy.deepcopy(model.state_dict()), 0
        else:
            bad += 1
            if bad == 4:
                print("stopped early")
                break
    model.load_state_dict(best_state)
    print(f"best {best:.4f}, restored {validate(model, val):.4f}")


if __name__ == "__main__":
    main()
