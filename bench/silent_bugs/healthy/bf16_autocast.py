"""bfloat16 autocast without a scaler: weights stay float32, one block is computed in float32."""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class SetModel(nn.Module):
    """Finds the largest element of a set: no positions, attention in all directions."""

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.attention = Attention(width, 4)
        self.norm = nn.LayerNorm(width)
        self.score = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x):
        hidden = self.embed(x[..., None])
        hidden = self.norm(hidden + self.attention(hidden))
        with torch.autocast("cpu", enabled=False):
            return self.score(hidden.float()).squeeze(-1)


def main():
    torch.manual_seed(0)
    model = SetModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(1, 101):
        x = torch.randn(128, 7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(logits, x.argmax(1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.eval()
    x = torch.randn(500, 7)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        print(f"accuracy {(model(x).argmax(1) == x.argmax(1)).float().mean():.3f}")


if __name__ == "__main__":
    main()
