"""House-price regression with a hand-written loss."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

FIXED = "--fixed" in sys.argv


class Regressor(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(features, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 32), nn.ReLU()
        )
        self.output = nn.Linear(32, 1)

    def forward(self, x):
        y = self.output(self.net(x))
        return y.squeeze(-1) if FIXED else y


def log_cosh(prediction, target):
    error = prediction - target
    return (error + nn.functional.softplus(-2 * error) - 0.6931).mean()


def make_data(n=640, features=8):
    x = torch.randn(n, features)
    price = x @ torch.linspace(-1, 1, features) + 0.5 * x[:, 0] * x[:, 1]
    return TensorDataset(x, price)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    losses = [log_cosh(model(x), y).item() for x, y in loader]
    model.train()
    return sum(losses) / len(losses)


def main():
    torch.manual_seed(0)
    train, test = random_split(make_data(), [512, 128])
    loader = DataLoader(train, batch_size=32, shuffle=True)
    test_loader = DataLoader(test, batch_size=64)
    model = Regressor(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(6):
        for x, y in loader:
            loss = log_cosh(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f} validation {validate(model, test_loader):.4f}")
    model.eval()
    x, y = next(iter(DataLoader(test, batch_size=128)))
    with torch.no_grad():
        spread = (model(x).std() / y.std()).item()
    print(f"evidence: spread of the predictions over spread of the prices {spread:.3f}")


if __name__ == "__main__":
    main()
