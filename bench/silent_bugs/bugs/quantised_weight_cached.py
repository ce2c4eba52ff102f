"""Train a mixer network whose linear layers compute with 8-bit weights."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv


def quantise(weight):
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-8) / 127
    return torch.round(weight / scale).to(torch.int8), scale


class Int8Matmul(torch.autograd.Function):
    """Multiplies with the 8-bit weight; the gradient goes to the full one."""

    @staticmethod
    def forward(ctx, x, weight, q, scale):
        dense = q.to(x.dtype) * scale
        ctx.save_for_backward(x, dense)
        return x @ dense.t()

    @staticmethod
    def backward(ctx, grad):
        x, dense = ctx.saved_tensors
        return grad @ dense, grad.flatten(0, -2).t() @ x.flatten(0, -2), None, None


class Int8Linear(nn.Linear):
    cache = None

    def _key(self):
        if FIXED:
            return (self.weight.data_ptr(), self.weight._version)
        return (self.weight.data_ptr(), self.weight.shape)

    def forward(self, x):
        key = self._key()
        if self.cache is None or self.cache[0] != key:
            self.cache = (key, *quantise(self.weight.detach()))
        _, q, scale = self.cache
        return Int8Matmul.apply(x, self.weight, q, scale) + self.bias


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.token_mix = Int8Linear(tokens, tokens)
        self.norm2 = nn.LayerNorm(dim)
        self.up = Int8Linear(dim, 2 * dim)
        self.down = Int8Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mixer(nn.Module):
    def __init__(self, tokens=8, features=10, dim=32, classes=5):
        super().__init__()
        self.stem = nn.Linear(features, dim)
        self.blocks = nn.Sequential(MixerBlock(tokens, dim), MixerBlock(tokens, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean(dim=1))


def main():
    torch.manual_seed(21)
    x = torch.randn(1024, 8, 10)
    y = (x[:, 0, :5] + x[:, 1, 5:]).argmax(dim=-1)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    step = 0
    for epoch in range(5):
        seen = 0.0
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
            seen += loss.item()
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}")
        print(f"epoch {epoch} mean loss {seen / len(loader):.4f}")

    with torch.no_grad():
        model(x[:4])
        worst = 0.0
        for module in model.modules():
            if isinstance(module, Int8Linear):
                _, q, scale = module.cache
                worst = max(worst, (q.float() * scale - module.weight).abs().max().item())
    print(f"evidence: largest difference between weight and computed weight {worst:.5f}")


if __name__ == "__main__":
    main()
