"""Matrix factorisation with an Adam whose update is captured as a graph once."""

import argparse

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx


def adam_update(param, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2):
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad * grad, 1 - beta2)
    root = (exp_avg_sq / (1 - beta2**step)).sqrt() + 1e-8
    return param.sub_(lr / (1 - beta1**step) * exp_avg / root)


class GraphAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), tensor_step=True):
        super().__init__(params, {"lr": lr, "betas": betas})
        self.tensor_step = tensor_step
        self.graphs = {}

    def _init_state(self, p):
        self.state[p] = {
            "step": torch.zeros(()) if self.tensor_step else 0,
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self._init_state(p)
                state = self.state[p]
                state["step"] += 1
                tensors = (p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"])
                numbers = (state["step"], group["lr"], *group["betas"])
                if p not in self.graphs:
                    copies = tuple(t.clone() for t in tensors)
                    self.graphs[p] = make_fx(adam_update)(*copies, *numbers)
                self.graphs[p](*tensors, *numbers)


class Factors(nn.Module):
    def __init__(self, users, items, rank):
        super().__init__()
        self.users = nn.Embedding(users, rank)
        self.items = nn.Embedding(items, rank)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, user, item):
        score = (self.users(user) * self.items(item)).sum(-1)
        return score + self.user_bias(user)[:, 0] + self.item_bias(item)[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(3)

    users, items = 60, 40
    truth = torch.randn(users, 4) @ torch.randn(4, items)
    model = Factors(users, items, rank=8)
    optimizer = GraphAdam(model.parameters(), lr=0.005, tensor_step=args.fixed)

    size = 0.0
    for step in range(1, 101):
        user = torch.randint(0, users, (512,))
        item = torch.randint(0, items, (512,))
        rating = truth[user, item] + 0.1 * torch.randn(512)
        loss = nn.functional.smooth_l1_loss(model(user, item), rating)
        optimizer.zero_grad()
        loss.backward()
        old = model.users.weight.detach().clone()
        optimizer.step()
        size = (model.users.weight.detach() - old).abs().mean().item()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")

    state = optimizer.state[model.users.weight]
    corrected = state["exp_avg"] / (1 - 0.9**100)
    root = (state["exp_avg_sq"] / (1 - 0.99**100)).sqrt() + 1e-8
    expected = (0.005 * corrected / root).abs().mean().item()
    print(f"evidence: last update is {size / expected:.4f} times what Adam's formula gives")


if __name__ == "__main__":
    main()
