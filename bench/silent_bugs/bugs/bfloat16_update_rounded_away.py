"""Continue training of a causal language model in bfloat16 with a small learning rate."""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab: int = 32
    dim: int = 48
    heads: int = 4
    length: int = 24
    batch: int = 16
    steps: int = 50
    lr: float = 1e-5


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.ln1, self.ln2 = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim)
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.proj = nn.Linear(cfg.dim, cfg.dim)
        self.fc1, self.fc2 = nn.Linear(cfg.dim, 4 * cfg.dim), nn.Linear(4 * cfg.dim, cfg.dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class LanguageModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.positions = nn.Embedding(cfg.length, cfg.dim)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(2))
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sequences(cfg, gen):
    start = torch.randint(0, cfg.vocab, (cfg.batch, 1), generator=gen)
    stride = torch.randint(1, 4, (cfg.batch, 1), generator=gen)
    return (start + stride * torch.arange(cfg.length + 1)) % cfg.vocab


def loss_of(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def write_base(path, cfg):
    """Stands in for the download of released weights."""
    torch.save({k: v.to(torch.bfloat16) for k, v in LanguageModel(cfg).state_dict().items()}, path)


def finetune(path, cfg, dtype):
    model = LanguageModel(cfg).to(dtype)
    model.load_state_dict(torch.load(path))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.0)
    gen = torch.Generator().manual_seed(13)
    for step in range(1, cfg.steps + 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, sequences(cfg, gen))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    pairs = list(zip(before, model.parameters(), strict=True))
    moved = sum((a != b).sum().item() for a, b in pairs)
    return moved / sum(a.numel() for a in before)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(2)
    cfg = Config()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.pt"
        write_base(path, cfg)
        share = finetune(path, cfg, torch.float32 if args.fixed else torch.bfloat16)
    print(f"evidence: share of weights that moved {share:.4f}")


if __name__ == "__main__":
    main()
