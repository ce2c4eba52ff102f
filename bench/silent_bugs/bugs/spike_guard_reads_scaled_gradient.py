"""Training with a loss scale and a guard that skips steps with a large gradient."""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    lr: float = 1e-3
    epochs: int = 5
    batch: int = 40
    max_norm: float = 20.0
    init_scale: float = 256.0


class ConvRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.out = nn.Linear(16 * 36, 2)

    def forward(self, x):
        x = F.elu(self.conv2(F.elu(self.conv1(x))))
        return self.out(x.flatten(1))


def dots(count):
    """Images with one dot; the target is where it is."""
    where = torch.rand(count, 2) * 11
    rows = torch.arange(12).view(1, 12, 1)
    cols = torch.arange(12).view(1, 1, 12)
    distance = (rows - where[:, 0].view(-1, 1, 1)) ** 2 + (cols - where[:, 1].view(-1, 1, 1)) ** 2
    return TensorDataset(torch.exp(-distance / 4).unsqueeze(1), where / 11)


def gradient_norm(model):
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    cfg = Config()
    torch.manual_seed(44)
    loader = DataLoader(dots(800), batch_size=cfg.batch, shuffle=True)
    model = ConvRegressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=cfg.init_scale, growth_interval=2000)

    step, skipped = 0, 0
    for _epoch in range(cfg.epochs):
        for x, target in loader:
            step += 1
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(x)
            loss = F.mse_loss(output.float(), target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if args.fixed:
                scaler.unscale_(optimizer)
            norm = gradient_norm(model)
            if norm < cfg.max_norm:
                scaler.step(optimizer)
                scaler.update()
            else:
                skipped += 1
                scaler.update(scaler.get_scale())
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.5f}")

    print(f"evidence: {skipped} of {step} steps skipped by the guard, last norm {norm:.4f}")


if __name__ == "__main__":
    main()
