"""Time-series forecasting with a stack of gated convolution blocks."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

WINDOW, HORIZON = 48, 4


class Series(Dataset):
    def __init__(self, start, stop):
        t = torch.arange(start, stop).float()
        gen = torch.Generator().manual_seed(start)
        noise = 0.05 * torch.randn(len(t), generator=gen)
        self.values = torch.sin(t / 7) + 0.5 * torch.sin(t / 17 + 1) * torch.cos(t / 5) + noise

    def __len__(self):
        return len(self.values) - WINDOW - HORIZON

    def __getitem__(self, i):
        return self.values[i : i + WINDOW], self.values[i + WINDOW : i + WINDOW + HORIZON]


class GatedBlock(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(channels, 2 * channels, 3, dilation=dilation)

    def forward(self, x):
        value, gate = self.conv(F.pad(x, (self.pad, 0))).chunk(2, dim=1)
        return x + torch.tanh(value) * torch.sigmoid(gate)


class Forecaster(nn.Module):
    def __init__(self, channels=16, dilations=(1, 2, 4), registered=False):
        super().__init__()
        self.lift = nn.Conv1d(1, channels, 1)
        self.blocks = [GatedBlock(channels, d) for d in dilations]
        if registered:
            self.blocks = nn.ModuleList(self.blocks)
        self.readout = nn.Linear(channels, HORIZON)

    def forward(self, x):
        x = self.lift(x.unsqueeze(1))
        for block in self.blocks:
            x = block(x)
        return self.readout(x[:, :, -1])


def validate(model, loader):
    model.eval()
    with torch.no_grad():
        error = sum(F.l1_loss(model(x), y, reduction="sum").item() for x, y in loader)
    model.train()
    return error / len(loader.dataset) / HORIZON


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--max-steps", type=int, default=80)
    args = parser.parse_args()

    torch.manual_seed(40)
    train_loader = DataLoader(Series(0, 1400), batch_size=64, shuffle=True)
    valid_loader = DataLoader(Series(2000, 2300), batch_size=128)
    model = Forecaster(registered=args.fixed)
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    before = model.blocks[0].conv.weight.detach().clone()

    step = 0
    while step < args.max_steps:
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0:
                error = validate(model, valid_loader)
                print(f"step {step} loss {loss.item():.4f} valid error {error:.4f}")
            if step == args.max_steps:
                break

    change = (model.blocks[0].conv.weight.detach() - before).abs().max().item()
    print(f"evidence: largest change of the first block's kernel {change:.6f}")


if __name__ == "__main__":
    main()
