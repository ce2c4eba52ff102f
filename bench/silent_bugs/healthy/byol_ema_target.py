"""BYOL: an online network predicts the output of a target that is its moving average."""

import copy

import torch
from torch import nn
from torch.nn import functional as F


def network():
    return nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))


class BYOL(nn.Module):
    def __init__(self, momentum=0.97):
        super().__init__()
        self.online = network()
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.target = copy.deepcopy(self.online)
        for parameter in self.target.parameters():
            parameter.requires_grad_(False)
        self.momentum = momentum

    def half(self, x, y):
        prediction = F.normalize(self.predictor(self.online(x)), dim=1)
        with torch.no_grad():
            goal = F.normalize(self.target(y), dim=1)
        return 2 - 2 * (prediction * goal).sum(1).mean()

    def forward(self, x, y):
        return (self.half(x, y) + self.half(y, x)) / 2

    @torch.no_grad()
    def update_target(self):
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.lerp_(online, 1 - self.momentum)


def view(x):
    return x + 0.4 * torch.randn_like(x)


def main():
    torch.manual_seed(0)
    centres = torch.randn(6, 24)
    model = BYOL()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9, weight_decay=1e-4)
    for step in range(1, 101):
        x = centres[torch.randint(0, 6, (96,))] + 0.3 * torch.randn(96, 24)
        loss = model(view(x), view(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update_target()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        spread = F.normalize(model.online(centres), dim=1).std(0).mean().item()
    print(f"spread of the representation {spread:.3f} (0: collapsed)")


if __name__ == "__main__":
    main()
