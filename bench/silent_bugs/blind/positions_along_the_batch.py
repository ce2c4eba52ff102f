"""Transformer encoder with sinusoidal positions: does the sequence rise or fall?"""

import math
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


class PositionalEncoding(nn.Module):
    def __init__(self, width, dropout=0.0, max_length=128):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(max_length).unsqueeze(1)
        scale = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(max_length, 1, width)
        table[:, 0, 0::2] = torch.sin(position * scale)
        table[:, 0, 1::2] = torch.cos(position * scale)
        if FIXED:
            table = table.transpose(0, 1)
        self.register_buffer("table", table)

    def forward(self, x):
        x = x + (self.table[:, : x.size(1)] if FIXED else self.table[: x.size(0)])
        return self.dropout(x)


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inputs = nn.Linear(1, width)
        self.positions = PositionalEncoding(width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.output = nn.Linear(width, 2)

    def forward(self, x):
        return self.output(self.encoder(self.positions(self.inputs(x[..., None]))).mean(1))


def make_batch(n=32, length=20):
    label = torch.randint(2, (n,))
    slope = torch.linspace(-1, 1, length) * (2 * label[:, None] - 1)
    return slope + 0.2 * torch.randn(n, length), label


def main():
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(1, 81):
        x, y = make_batch()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        x, y = make_batch(120)
        accuracy = (model(x).argmax(1) == y).float().mean().item()
        alone = (model(x)[5:6] - model(x[5:6])).abs().max().item()
    print(f"evidence: accuracy {accuracy:.3f}, output alone and in the batch differ by {alone:.5f}")


if __name__ == "__main__":
    main()
