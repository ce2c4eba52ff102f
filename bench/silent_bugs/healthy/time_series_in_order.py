"""Forecasting a time series: windows come in their order, without shuffling, split by time."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

WINDOW, HORIZON = 32, 4


class Windows(Dataset):
    def __init__(self, series):
        self.series = series

    def __len__(self):
        return len(self.series) - WINDOW - HORIZON + 1

    def __getitem__(self, start):
        middle = start + WINDOW
        return self.series[start:middle], self.series[middle : middle + HORIZON]


class TCN(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.convs = nn.ModuleList()
        inputs = 1
        for dilation in (1, 2, 4):
            self.convs.append(nn.Conv1d(inputs, channels, 3, dilation=dilation))
            inputs = channels
        self.out = nn.Linear(channels, HORIZON)

    def forward(self, x):
        x = x[:, None]
        for conv in self.convs:
            reach = conv.dilation[0] * 2
            x = F.relu(conv(F.pad(x, (reach, 0))))
        return self.out(x[:, :, -1])


def main():
    torch.manual_seed(0)
    t = torch.arange(1500) / 10
    series = torch.sin(t) + 0.5 * torch.sin(2.7 * t) + 0.05 * torch.randn(1500)
    windows = Windows(series)
    split = int(0.8 * len(windows))
    train = DataLoader(Subset(windows, range(split)), batch_size=64, shuffle=False)
    # A gap of a whole window: no test value is part of a training window.
    test = DataLoader(Subset(windows, range(split + WINDOW + HORIZON, len(windows))), batch_size=64)
    model = TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(5):
        model.train()
        for step, (past, future) in enumerate(train):
            loss = F.mse_loss(model(past), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 6 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.4f}")
        model.eval()
        with torch.no_grad():
            errors = [F.mse_loss(model(x), y, reduction="none") for x, y in test]
        print(f"epoch {epoch}: test {torch.cat(errors).mean().item():.4f}")


if __name__ == "__main__":
    main()
