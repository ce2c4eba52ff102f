"""Noise prediction (diffusion) with averaged weights; the second half is a resumed run."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


class ShadowWeights:
    """Exponential moving average of the parameters by name."""

    def __init__(self, model: nn.Module, decay: float = 0.98):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, model: nn.Module):
        for name, p in model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    def state_dict(self):
        return {"decay": self.decay, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.decay = state["decay"]
        self.shadow = {n: t.clone() for n, t in state["shadow"].items()}


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU())
        self.point = nn.Linear(2, width)
        self.body = nn.Sequential(
            nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x, t):
        return self.body(self.point(x) + self.time(t))


def diffusion_loss(model, generator, size=128):
    angle = torch.rand(size, 1, generator=generator) * 2 * torch.pi
    clean = torch.cat([angle.cos(), angle.sin()], 1)
    noise = torch.randn(size, 2, generator=generator)
    t = torch.rand(size, 1, generator=generator)
    noisy = (1 - t).sqrt() * clean + t.sqrt() * noise
    return nn.functional.mse_loss(model(noisy, t), noise)


class Trainer:
    def __init__(self, folder: str):
        self.path = Path(folder) / "state.pt"
        self.model = Denoiser()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.average = ShadowWeights(self.model)
        self.generator = torch.Generator().manual_seed(70)
        self.step = 0

    def save(self):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "ema": self.average.state_dict(),
                "generator": self.generator.get_state(),
                "step": self.step,
            },
            self.path,
        )

    def load(self):
        state = torch.load(self.path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.step = state["step"]
        if FIXED:
            self.average.load_state_dict(state["ema"])

    def train(self, until: int):
        while self.step < until:
            loss = diffusion_loss(self.model, self.generator)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.average.update(self.model)
            self.step += 1
            if self.step % 10 == 0:
                print(f"step {self.step} loss {loss.item():.4f}")


def main():
    torch.manual_seed(14)
    with tempfile.TemporaryDirectory() as folder:
        first = Trainer(folder)
        first.train(60)
        first.save()
        second = Trainer(folder)
        second.load()
    gap = max((first.average.shadow[n] - t).abs().max() for n, t in second.average.shadow.items())
    second.train(110)
    print(f"evidence: averaged weights changed by {gap.item():.6f} in saving and loading")


if __name__ == "__main__":
    main()
