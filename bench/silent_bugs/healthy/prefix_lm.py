"""A prefix language model: both directions inside the prefix, causal after it."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, PREFIX, LENGTH, WIDTH, HEADS = 12, 5, 10, 48, 4


def prefix_mask(prefix, length):
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    allowed[:prefix, :prefix] = True
    return allowed


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))

    def forward(self, x, mask):
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(n, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class PrefixLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        mask = prefix_mask(PREFIX, ids.size(1))
        x = self.embedding(ids) + self.position(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def batch(n):
    """The sorted prefix follows the prefix."""
    prefix = torch.randint(0, VOCAB, (n, PREFIX))
    return torch.cat([prefix, prefix.sort(1).values], dim=1)


def answer_loss(model, ids):
    logits = model(ids[:, :-1])
    # Only tokens after the prefix are predicted: the last position of the prefix gives the first.
    return F.cross_entropy(logits[:, PREFIX - 1 :].flatten(0, 1), ids[:, PREFIX:].flatten())


def main():
    torch.manual_seed(0)
    model = PrefixLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 121):
        loss = answer_loss(model, batch(96))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            model.eval()
            with torch.no_grad():
                val = answer_loss(model, batch(200)).item()
            model.train()
            print(f"step {step}: loss {loss.item():.3f}, validation {val:.3f}")


if __name__ == "__main__":
    main()
