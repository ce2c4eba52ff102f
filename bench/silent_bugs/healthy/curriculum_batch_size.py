"""A curriculum: short sequences in large batches first, then longer ones in smaller batches."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Majority(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.cell = nn.GRU(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, bits):
        _, last = self.cell(bits[..., None])
        return self.out(last[0]).squeeze(1)


def sums(n, length):
    bits = torch.randint(0, 2, (n, length)).float()
    return TensorDataset(bits, (bits.sum(1) > length / 2).float())


STAGES = [(3, 128, 3), (7, 64, 3), (13, 32, 2)]


def main():
    torch.manual_seed(0)
    model = Majority()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    for length, batch_size, epochs in STAGES:
        data = sums(640, length)
        loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        print(f"length {length}, batches of {batch_size}")
        for _ in range(epochs):
            for bits, label in loader:
                loss = F.binary_cross_entropy_with_logits(model(bits), label)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                step += 1
                if step % 5 == 0:
                    print(f"step {step}: loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        bits, label = sums(400, 13).tensors
        print(f"accuracy {((model(bits) > 0).float() == label).float().mean():.3f}")


if __name__ == "__main__":
    main()
