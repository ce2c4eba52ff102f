"""Packed documents: several per row, a block-diagonal causal mask, positions start anew."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, LENGTH, WIDTH, HEADS = 16, 32, 32, 4


def pack(rows):
    """Fills each row with documents; returns tokens, labels, document numbers and positions."""
    ids = torch.zeros(rows, LENGTH, dtype=torch.long)
    labels = torch.full((rows, LENGTH), -100)
    documents = torch.zeros(rows, LENGTH, dtype=torch.long)
    places = torch.zeros(rows, LENGTH, dtype=torch.long)
    for row in range(rows):
        at, number = 0, 0
        while at < LENGTH:
            size = min(int(torch.randint(5, 12, ())), LENGTH - at)
            start, stride = torch.randint(0, VOCAB, ()), torch.randint(1, 4, ())
            text = (start + stride * torch.arange(size)) % VOCAB
            ids[row, at : at + size] = text
            labels[row, at : at + size - 1] = text[1:]  # nothing is predicted across a border
            documents[row, at : at + size] = number
            places[row, at : at + size] = torch.arange(size)
            at, number = at + size, number + 1
    return ids, labels, documents, places


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))

    def forward(self, x, mask):
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(n, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class PackedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, documents, places):
        same = documents[:, :, None] == documents[:, None, :]
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = (same & causal)[:, None]
        x = self.tokens(ids) + self.positions(places)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def main():
    torch.manual_seed(0)
    model = PackedLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(1, 91):
        ids, labels, documents, places = pack(16)
        logits = model(ids, documents, places)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
