"""Fine-tuning that loads a checkpoint with `strict=False`: no name matches, nothing is loaded."""

import io
import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
PRETRAIN, FINETUNE = 30, 30


def make_encoder():
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = make_encoder()
        self.decoder = nn.Linear(32, 40)

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = make_encoder()
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.backbone(x))


def pretrain(data):
    model = MaskedAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(PRETRAIN):
        x = data[torch.randint(len(data), (128,))]
        loss = F.mse_loss(model(x * (torch.rand_like(x) > 0.3)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"pretraining loss {loss.item():.4f}")
    file = io.BytesIO()
    torch.save({"model": model.state_dict()}, file)
    return file


def main():
    torch.manual_seed(0)
    mix = torch.randn(6, 40) / 2
    factors = torch.randn(2000, 6)
    data = factors @ mix + 0.1 * torch.randn(2000, 40)
    labels = factors[:, :5].argmax(1)
    file = pretrain(data)

    file.seek(0)
    state = torch.load(file)["model"]
    if FIXED:
        state = {k.replace("encoder.", "backbone."): v for k, v in state.items()}
    model = Classifier()
    start = model.backbone[0].weight.detach().clone()
    model.load_state_dict(state, strict=False)
    loaded = not torch.equal(start, model.backbone[0].weight)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(FINETUNE):
        rows = torch.randint(200, (32,))
        loss = F.cross_entropy(model(data[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")
    print(f"evidence: loading changed the backbone: {loaded}")


if __name__ == "__main__":
    main()
