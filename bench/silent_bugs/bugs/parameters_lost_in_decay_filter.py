"""Small vision transformer with separate weight decay groups."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
IMAGE, PATCH, DIM, CLASSES = 16, 4, 40, 5


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(1, DIM, PATCH, PATCH)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (IMAGE // PATCH) ** 2 + 1, DIM))
        layer = nn.TransformerEncoderLayer(
            DIM, 4, 2 * DIM, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.patches(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.encoder(x))[:, 0])


def param_groups(model, weight_decay):
    decay, no_decay = [], []
    for name, param in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            no_decay.append(param)
        elif name.endswith("weight"):
            decay.append(param)
        elif FIXED:
            no_decay.append(param)
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


def blobs(count):
    """A bright patch; the class is the row or corner where it is."""
    spots = torch.tensor([[0, 0], [0, 12], [12, 0], [12, 12], [6, 6]])
    labels = torch.randint(0, CLASSES, (count,))
    images = 0.5 * torch.randn(count, 1, IMAGE, IMAGE)
    for image, label in zip(images, labels.tolist(), strict=True):
        r, c = spots[label].tolist()
        image[0, r : r + 4, c : c + 4] += 2.5
    return TensorDataset(images, labels)


def main():
    torch.manual_seed(50)
    loader = DataLoader(blobs(512), batch_size=32, shuffle=True)
    model = ViT()
    optimizer = torch.optim.AdamW(param_groups(model, 0.05), lr=3e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64)
    before = model.pos_embed.detach().clone()

    step = 0
    for _epoch in range(4):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 8 == 0:
                print(f"step {step} loss {loss.item():.4f}")

    change = (model.pos_embed.detach() - before).abs().max().item()
    print(f"evidence: largest change of pos_embed {change:.6f}")


if __name__ == "__main__":
    main()
