"""Train a 1-D convolutional denoiser and keep averaged weights for the release."""

import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


class ExponentialMovingAverage:
    """Shadow copy of parameters, in float32."""

    def __init__(self, parameters, decay):
        self.parameters = list(parameters)
        self.decay = decay
        self.shadow = [p.detach().clone().float() for p in self.parameters]
        self.backup = None

    @torch.no_grad()
    def update(self):
        for shadow, p in zip(self.shadow, self.parameters, strict=True):
            gap = (shadow - p.float()) * (1 - self.decay)
            if FIXED:
                shadow.sub_(gap)
            else:
                shadow.add_(gap)

    @torch.no_grad()
    def store_and_apply(self):
        self.backup = [p.detach().clone() for p in self.parameters]
        for shadow, p in zip(self.shadow, self.parameters, strict=True):
            p.copy_(shadow)

    @torch.no_grad()
    def restore(self):
        for backup, p in zip(self.backup, self.parameters, strict=True):
            p.copy_(backup)
        self.backup = None


class Denoiser(nn.Sequential):
    def __init__(self, channels=16):
        super().__init__(
            nn.Conv1d(1, channels, 7, padding=3),
            nn.LeakyReLU(0.1),
            nn.Conv1d(channels, channels, 7, padding=3),
            nn.LeakyReLU(0.1),
            nn.Conv1d(channels, 1, 7, padding=3),
        )


def steps_signal(generator, size=24, length=48):
    """Piecewise constant signals and their noisy versions."""
    jumps = torch.randn(size, 1, length, generator=generator)
    jumps = jumps * (torch.rand(size, 1, length, generator=generator) < 0.1)
    clean = jumps.cumsum(-1)
    return clean, clean + 0.3 * torch.randn(clean.shape, generator=generator)


def main():
    torch.manual_seed(77)
    generator = torch.Generator().manual_seed(78)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    average = ExponentialMovingAverage(model.parameters(), decay=0.97)
    for step in range(1, 101):
        clean, noisy = steps_signal(generator)
        loss = nn.functional.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")

    gap = torch.cat(
        [(s - p).flatten() for s, p in zip(average.shadow, average.parameters, strict=True)]
    )
    size = torch.cat([p.detach().flatten() for p in average.parameters])
    average.store_and_apply()
    released = {name: value.clone() for name, value in model.state_dict().items()}
    average.restore()
    print(f"released {len(released)} tensors")
    print(f"evidence: relative distance of the average {(gap.norm() / size.norm()).item():.4f}")


if __name__ == "__main__":
    main()
