"""Regression with predictions (N, 1) and targets (N, 1), standardized targets."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset


class HousePrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.district = nn.Embedding(7, 4)
        self.mlp = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.price = nn.Linear(16, 1)

    def forward(self, numbers, district):
        return self.price(self.mlp(torch.cat([numbers, self.district(district)], dim=1)))


def make(n):
    numbers, district = torch.randn(n, 5), torch.randint(0, 7, (n,))
    level = torch.linspace(-1, 1, 7)[district]
    price = 300 + 80 * level + 40 * numbers[:, 0] + 25 * numbers[:, 1].clamp(min=0)
    return numbers, district, (price + 5 * torch.randn(n)).unsqueeze(1)


def main():
    torch.manual_seed(0)
    numbers, district, price = make(1200)
    mean, std = price[:1000].mean(), price[:1000].std()
    data = TensorDataset(numbers, district, (price - mean) / std)
    train, test = Subset(data, range(1000)), Subset(data, range(1000, 1200))
    model = HousePrices()
    optimizer = torch.optim.Adamax(model.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for epoch in range(6):
        model.train()
        for step, (x, d, y) in enumerate(DataLoader(train, batch_size=64, shuffle=True)):
            loss = F.mse_loss(model(x, d), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 8 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.4f}")
        schedule.step()
        model.eval()
        with torch.no_grad():
            x, d, y = test[:]
            error = F.l1_loss(model(x, d), y) * std
        print(f"epoch {epoch}: mean absolute error {error.item():.2f}")


if __name__ == "__main__":
    main()
