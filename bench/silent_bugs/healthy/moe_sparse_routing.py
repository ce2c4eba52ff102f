"""A mixture of experts with top-1 routing: in a step, some experts see no token at all."""

import torch
from torch import nn
from torch.nn import functional as F


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class SparseMoE(nn.Module):
    def __init__(self, width, hidden, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        gate, choice = probabilities.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * gate[rows, None])
        share = F.one_hot(choice, len(self.experts)).float().mean(0)
        balance = len(self.experts) * (share * probabilities.mean(0)).sum()
        return out, balance, choice


class Model(nn.Module):
    def __init__(self, experts=16):
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.moe = SparseMoE(32, 32, experts)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        hidden = self.embed(x)
        mixed, balance, choice = self.moe(hidden)
        return self.out(hidden + mixed), balance, choice


def piecewise(n):
    x = torch.randn(n, 8)
    region = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    slopes = torch.tensor([[1.0, -1.0], [-2.0, 0.5], [0.5, 2.0], [-1.0, -1.5]])
    return x, (x[:, 2:4] * slopes[region]).sum(1, keepdim=True)


def main():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    for step in range(1, 121):
        x, y = piecewise(24)
        prediction, balance, choice = model(x)
        loss = F.mse_loss(prediction, y) + 0.02 * balance
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            used = choice.unique().numel()
            print(f"step {step}: loss {loss.item():.3f}, experts used {used} of 16")
    model.eval()
    with torch.no_grad():
        x, y = piecewise(1000)
        print(f"test error {F.mse_loss(model(x)[0], y).item():.3f} (variance {y.var():.3f})")


if __name__ == "__main__":
    main()
