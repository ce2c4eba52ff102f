"""Monte Carlo dropout: dropout stays on in evaluation on purpose, to estimate uncertainty."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self, hidden=64, p=0.1):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(1, hidden), nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, 1)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        x = self.dropout(F.relu(self.fc1(x)))
        x = self.dropout(F.relu(self.norm(self.fc2(x))))
        return self.out(x)


def enable_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()


@torch.no_grad()
def predict(model, x, samples=20):
    model.eval()
    enable_dropout(model)
    draws = torch.stack([model(x) for _ in range(samples)])
    model.train()
    return draws.mean(0), draws.std(0)


def main():
    torch.manual_seed(0)
    x = torch.rand(512, 1) * 4 - 2
    y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    grid = torch.linspace(-2, 2, 50)[:, None]
    far = torch.linspace(4, 6, 50)[:, None]
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(12):
        for batch_x, batch_y in loader:
            loss = F.mse_loss(model(batch_x), batch_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 2 == 1:
            mean, near_std = predict(model, grid)
            _, far_std = predict(model, far)
            error = F.mse_loss(mean, torch.sin(2 * grid)).item()
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, error {error:.4f}, "
                f"uncertainty inside {near_std.mean():.3f}, outside {far_std.mean():.3f}"
            )


if __name__ == "__main__":
    main()
