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
    def __init__(self, experts=8):
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.moe = SparseMoE(32, 32, experts)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        hidden = self.embed(x)
        mixed, balance, choice = self.moe(hidden)
        return self.out(hidden + mixed), balance, choice


def conversation(centres, slopes, n, topics=3):
    """Tokens of a few topics; each topic has a linear rule of its own."""
    chosen = torch.randperm(len(centres))[:topics]
    topic = chosen[torch.randint(0, topics, (n,))]
    x = centres[topic] + 0.5 * torch.randn(n, 8)
    return x, (x * slopes[topic]).sum(1, keepdim=True)


def main():
    torch.manual_seed(0)
    centres, slopes = 2 * torch.randn(8, 8), 0.5 * torch.randn(8, 8)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    ever_used = set()
    for step in range(1, 121):
        x, y = conversation(centres, slopes, 48)
        prediction, balance, choice = model(x)
        loss = F.mse_loss(prediction, y) + 0.3 * balance
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        used = set(choice.tolist())
        ever_used |= used
        if step % 10 == 0:
            print(
                f"step {step}: loss {loss.item():.3f}, {len(used)} of {len(model.moe.experts)} used"
            )
    model.eval()
    with torch.no_grad():
        x, y = conversation(centres, slopes, 1000, topics=8)
        prediction, _, choice = model(x)
    share = torch.bincount(choice, minlength=len(model.moe.experts)).div(1000).tolist()
    print(f"test error {F.mse_loss(prediction, y).item():.3f} (variance {y.var():.3f})")
    print(f"experts ever used {len(ever_used)}, shares {[round(s, 2) for s in share]}")


if __name__ == "__main__":
    main()
