"""Fine-tune a pretrained forecaster with a lower learning rate, keeping the optimizer's state."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--finetune-lr", type=float, default=2e-4)
args = parser.parse_args()


class Forecaster(nn.Module):
    def __init__(self, history=16, width=32):
        super().__init__()
        self.rnn = nn.RNN(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.rnn(x.unsqueeze(-1))[0][:, -1]).squeeze(-1)


def series(generator, size, frequency):
    phase = torch.rand(size, 1, generator=generator) * 6.28
    t = torch.arange(17.0)
    wave = torch.sin(frequency * t + phase) + 0.05 * torch.randn(size, 17, generator=generator)
    return wave[:, :-1], wave[:, -1]


def fit(model, optimizer, generator, frequency, steps, name):
    for step in range(1, steps + 1):
        x, y = series(generator, 32, frequency)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"{name} step {step} loss {loss.item():.5f}")


def pretrain(path):
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    fit(model, optimizer, torch.Generator().manual_seed(0), 0.7, 50, "pretrain")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def finetune(path):
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.finetune_lr)
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if args.fixed:
        for group in optimizer.param_groups:
            group["lr"] = args.finetune_lr
    print(f"fine-tuning with lr {args.finetune_lr}")
    fit(model, optimizer, torch.Generator().manual_seed(1), 0.8, 60, "finetune")
    return optimizer


def main():
    torch.manual_seed(20)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pretrained.pt"
        pretrain(path)
        optimizer = finetune(path)
    used = optimizer.param_groups[0]["lr"]
    print(f"evidence: lr in use {used:g}, lr asked for {args.finetune_lr:g}")


if __name__ == "__main__":
    main()
