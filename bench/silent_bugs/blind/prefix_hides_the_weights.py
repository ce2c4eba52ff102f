"""Pretrain an encoder inside a wrapper, save it, and fine-tune a classifier from the file."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv


class Encoder(nn.Module):
    def __init__(self, inputs=16, width=48):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inputs, width), nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.fc2(torch.tanh(self.fc1(x))))


class Reconstruction(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Encoder()
        self.decoder = nn.Linear(48, 16)

    def forward(self, x):
        return F.mse_loss(self.decoder(self.model(x)), x)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


def sample(n):
    mixing = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    z = torch.randn(n, 4)
    return z @ mixing, z[:, :3].argmax(1)


def pretrain(path, steps=50):
    model = Reconstruction()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = model(sample(64)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"pretraining loss {loss.item():.4f}")
    torch.save({"state_dict": model.state_dict()}, path)
    return model.model


def load_encoder(encoder, path):
    state = torch.load(path)["state_dict"]
    if FIXED:
        state = {k.removeprefix("model."): v for k, v in state.items()}
    # the decoder is not needed here
    encoder.load_state_dict(state, strict=False)


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.pt"
        pretrained = pretrain(path)
        model = Classifier()
        load_encoder(model.encoder, path)
    gap = (model.encoder.fc1.weight - pretrained.fc1.weight).abs().max().item()
    optimizer = torch.optim.Adam(
        [
            {"params": model.encoder.parameters(), "lr": 1e-4},
            {"params": model.head.parameters(), "lr": 5e-3},
        ]
    )
    for step in range(1, 61):
        x, y = sample(32)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"evidence: distance of the loaded encoder from the saved one {gap:.4f}")


if __name__ == "__main__":
    main()
