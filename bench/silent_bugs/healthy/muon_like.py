"""Matrices with an orthogonalized-momentum optimizer, everything else with AdamW."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer


def orthogonalize(matrix, iterations=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    wide = x.size(0) <= x.size(1)
    x = x if wide else x.T
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


class OrthogonalMomentum(Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                direction = p.grad + group["momentum"] * buffer
                scale = max(1.0, p.size(0) / p.size(1)) ** 0.5
                p.add_(orthogonalize(direction), alpha=-group["lr"] * scale)


class Net(nn.Module):
    def __init__(self, vocab=30, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.embedding(ids).mean(1)
        for norm, layer in zip(self.norms, self.hidden, strict=True):
            x = x + F.relu(layer(norm(x)))
        return self.head(x)


def batch(table, n=96):
    ids = torch.randint(0, 30, (n, 2))
    return ids, table[ids[:, 0], ids[:, 1]]


def main():
    torch.manual_seed(0)
    order = torch.arange(30)
    table = torch.maximum(order[:, None], order[None, :])
    model = Net()
    matrices = [layer.weight for layer in model.hidden]
    ids_of_matrices = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids_of_matrices]
    optimizers = [OrthogonalMomentum(matrices), torch.optim.AdamW(others, lr=1e-2)]
    for step in range(1, 111):
        ids, y = batch(table)
        loss = F.cross_entropy(model(ids), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
