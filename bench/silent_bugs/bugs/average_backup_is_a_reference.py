"""Regression with averaged weights; they are loaded for each validation."""

import argparse
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


class PointNet(nn.Module):
    """Energy of a set of points, a sum over all pairs."""

    def __init__(self, hidden=32):
        super().__init__()
        self.pair = nn.Sequential(
            nn.Linear(1, hidden), nn.Softplus(), nn.Linear(hidden, hidden), nn.Softplus()
        )
        self.energy = nn.Linear(hidden, 1)

    def forward(self, points):
        distance = torch.cdist(points, points).flatten(1).unsqueeze(-1)
        return self.energy(self.pair(distance)).mean(dim=1).squeeze(-1)


def molecules(count):
    points = 1.5 * torch.randn(count, 5, 3)
    distance = torch.cdist(points, points) + 3 * torch.eye(5)
    energy = (torch.exp(-distance) - 0.3 / (1 + distance**2)).sum(dim=(1, 2))
    return TensorDataset(points, (energy - energy.mean()) / energy.std())


class Experiment:
    def __init__(self, fixed):
        self.fixed = fixed
        self.model = PointNet()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.cached = None

    def train_step(self, points, energy):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(points), energy)
        loss.backward()
        self.optimizer.step()
        self.average.update_parameters(self.model)
        return loss.item()

    def on_validation_start(self):
        self.model.eval()
        self.cached = self.model.state_dict()
        if self.fixed:
            self.cached = deepcopy(self.cached)
        self.model.load_state_dict(self.average.module.state_dict())

    def on_validation_end(self):
        self.model.load_state_dict(self.cached)
        self.cached = None
        self.model.train()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(91)
    train_loader = DataLoader(molecules(600), batch_size=30, shuffle=True)
    points, energy = molecules(100).tensors
    experiment = Experiment(args.fixed)

    step, jumps = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(4):
            for batch in train_loader:
                loss = experiment.train_step(*batch)
                step += 1
                if step % 10 == 0:
                    print(f"step {step} loss {loss:.4f}")
            before = experiment.model.energy.weight.detach().clone()
            experiment.on_validation_start()
            with torch.no_grad():
                error = (experiment.model(points) - energy).abs().mean().item()
            torch.save(experiment.model.state_dict(), Path(folder) / "best.pt")
            experiment.on_validation_end()
            jumps.append((experiment.model.energy.weight.detach() - before).abs().max().item())
            print(f"epoch {epoch} error {error:.4f}")

    print(f"evidence: validation changed energy.weight by {max(jumps):.6f}")


if __name__ == "__main__":
    main()
