"""Train a regression network; the optimizer's state is made before the first step."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self, features=16, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.body(x)).squeeze(-1)


def allocate_state(optimizer, reset_counters):
    """Makes exp_avg and exp_avg_sq, so that a checkpoint can be loaded into them."""
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, (lr, weight_decay) in zip(optimizer.param_groups, rates, strict=True):
        group["lr"], group["weight_decay"] = lr, weight_decay
    if reset_counters:
        for state in optimizer.state.values():
            state["step"].zero_()


def save(path, model, optimizer, step):
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}, path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(4)
    x = torch.randn(1200, 16)
    y = torch.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * torch.randn(1200)
    loader = DataLoader(TensorDataset(x, y), batch_size=60, shuffle=True)

    model = Regressor()
    lr = 2e-3
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    allocate_state(optimizer, reset_counters=args.fixed)

    first = model.body[0].weight.detach().clone()
    step, size = 0, None
    with tempfile.TemporaryDirectory() as folder:
        for _epoch in range(4):
            for xb, yb in loader:
                loss = nn.functional.mse_loss(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step == 1:
                    size = (model.body[0].weight.detach() - first).abs().max().item() / lr
                if step % 10 == 0:
                    print(f"step {step} loss {loss.item():.4f}")
            save(Path(folder) / "last.pt", model, optimizer, step)

    counted = int(next(iter(optimizer.state.values()))["step"].item())
    print(f"evidence: first update {size:.4f} of lr, optimizer counted {counted} of {step} steps")


if __name__ == "__main__":
    main()
