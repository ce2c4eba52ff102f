"""Fine-tune a backbone and a new head with two learning rates."""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv


class AudioBackbone(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, channels, 9, stride=4),
            nn.GELU(),
            nn.Conv1d(channels, channels, 5, stride=2),
            nn.GELU(),
        )

    def forward(self, wave):
        return self.layers(wave.unsqueeze(1)).mean(dim=-1)


class KeywordSpotter(nn.Module):
    def __init__(self, backbone, classes=4):
        super().__init__()
        self.backbone = backbone
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, classes)

    def extract(self, wave):
        with nullcontext() if FIXED else torch.no_grad():
            return self.backbone(wave)

    def forward(self, wave):
        return self.head(self.norm(self.extract(wave)))


def tones(count):
    label = torch.randint(0, 4, (count,))
    t = torch.arange(160).float()
    frequency = 0.15 * (label + 1).view(-1, 1) + 0.02 * torch.randn(count, 1)
    wave = torch.sin(t * frequency + 6.28 * torch.rand(count, 1)) + 0.8 * torch.randn(count, 160)
    return TensorDataset(wave, label)


def load_backbone(folder):
    path = Path(folder) / "backbone.pt"
    torch.save(AudioBackbone().state_dict(), path)
    backbone = AudioBackbone()
    backbone.load_state_dict(torch.load(path))
    return backbone


def main():
    torch.manual_seed(62)
    with tempfile.TemporaryDirectory() as folder:
        model = KeywordSpotter(load_backbone(folder))
    train_loader = DataLoader(tones(640), batch_size=32, shuffle=True)
    wave, label = tones(128).tensors
    head = [*model.norm.parameters(), *model.head.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": model.backbone.parameters(), "lr": 1e-3}, {"params": head, "lr": 1e-2}]
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    before = torch.cat([p.detach().flatten() for p in model.backbone.parameters()])

    step = 0
    for epoch in range(4):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}")
        scheduler.step()
        model.eval()
        with torch.no_grad():
            right = (model(wave).argmax(1) == label).float().mean().item()
        print(f"epoch {epoch} accuracy {right:.3f}")

    after = torch.cat([p.detach().flatten() for p in model.backbone.parameters()])
    print(f"evidence: norm of the change of the backbone {(after - before).norm().item():.6f}")


if __name__ == "__main__":
    main()
