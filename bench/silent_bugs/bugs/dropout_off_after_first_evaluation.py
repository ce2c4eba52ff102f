"""Encoder for masked tokens with its own attention, evaluated now and then."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, MASK = 30, 0


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, dropout, keep_setting):
        super().__init__()
        self.heads = heads
        self.dropout_p = dropout
        self.keep_setting = keep_setting
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def _probability(self):
        if self.training:
            return self.dropout_p
        if not self.keep_setting:
            self.dropout_p = 0.0
        return 0.0

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self._probability())
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class EncoderLayer(nn.Module):
    def __init__(self, dim, keep_setting):
        super().__init__()
        self.attention = SelfAttention(dim, 4, 0.2, keep_setting)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.ffn(x))


class MaskedModel(nn.Module):
    def __init__(self, dim=32, layers=2, keep_setting=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(16, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim, keep_setting) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch_of(size):
    first = torch.randint(1, VOCAB, (size, 1))
    ids = (first + 2 * torch.arange(16) - 1) % (VOCAB - 1) + 1
    masked = torch.rand(ids.shape) < 0.2
    masked[:, 3] = True
    return ids.masked_fill(masked, MASK), ids.masked_fill(~masked, -100)


def loss_of(model, batch):
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--eval-every", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(82)
    model = MaskedModel(keep_setting=args.fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=90)
    valid = batch_of(64)

    model.train()
    for step in range(1, 91):
        loss = loss_of(model, batch_of(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % args.eval_every == 0:
            model.eval()
            with torch.no_grad():
                valid_loss = loss_of(model, valid).item()
            model.train()
            print(f"step {step} loss {loss.item():.4f} valid loss {valid_loss:.4f}")

    with torch.no_grad():
        difference = (model(valid[0]) - model(valid[0])).abs().max().item()
    print(f"evidence: two forward passes in training mode differ by {difference:.5f}")


if __name__ == "__main__":
    main()
