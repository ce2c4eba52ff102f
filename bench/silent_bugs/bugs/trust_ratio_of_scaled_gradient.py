"""Mixed-precision training with a learning rate per layer from a trust ratio."""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    trust: float = 0.002
    momentum: float = 0.9
    epochs: int = 5
    batch: int = 40
    init_scale: float = 1024.0


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


def set_trust_ratios(optimizer, trust):
    """The rate of a parameter is in proportion to its norm over its gradient's norm."""
    for group in optimizer.param_groups:
        (param,) = group["params"]
        ratio = param.detach().norm() / param.grad.norm().clamp_min(1e-6)
        group["lr"] = trust * ratio.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    cfg = Config()
    torch.manual_seed(44)
    loader = DataLoader(dots(800), batch_size=cfg.batch, shuffle=True)
    model = ConvRegressor()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=cfg.trust, momentum=cfg.momentum)
    scaler = torch.amp.GradScaler("cpu", init_scale=cfg.init_scale, growth_interval=2000)

    step, sizes = 0, []
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
            set_trust_ratios(optimizer, cfg.trust)
            before = model.conv2.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            sizes.append(((model.conv2.weight.detach() - before).norm() / before.norm()).item())
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.5f}")

    mean = sum(sizes) / len(sizes)
    print(f"evidence: mean relative update of conv2.weight {mean:.8f}")


if __name__ == "__main__":
    main()
