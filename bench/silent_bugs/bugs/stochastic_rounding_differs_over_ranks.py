"""Data-parallel training with bfloat16 weights and stochastic rounding of the updates."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--seed", type=int, default=3)
args = parser.parse_args()


def round_stochastically(value: torch.Tensor, generator) -> torch.Tensor:
    """float32 to bfloat16: up or down with a probability given by the bits that are cut off."""
    bits = value.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, generator=generator)
    return ((bits + noise) & -65536).view(torch.float32).to(torch.bfloat16)


class RoundingSGD(torch.optim.Optimizer):
    """SGD with momentum in float32 for parameters in bfloat16."""

    def __init__(self, params, lr, momentum=0.9, generator=None):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.generator = generator

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                buffer = state["momentum"]
                buffer.mul_(group["momentum"]).add_(p.grad.float())
                new = p.float() - group["lr"] * buffer
                p.copy_(round_stochastically(new, self.generator))


class DropoutMLP(nn.Module):
    def __init__(self, features=20, width=64, classes=6):
        super().__init__()
        self.inner = nn.Linear(features, width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        x = F.dropout(F.relu(self.inner(x)), 0.1, self.training)
        x = F.relu(self.hidden(x))
        return self.out(x).float()


def average_gradients(model):
    for p in model.parameters():
        grad = p.grad.float()
        dist.all_reduce(grad)
        p.grad.copy_(grad / dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = DropoutMLP().to(torch.bfloat16)
    teacher = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    # Dropout must not be the same on all ranks.
    torch.manual_seed(args.seed + 1000 * rank)
    generator = torch.Generator().manual_seed(args.seed) if args.fixed else None
    optimizer = RoundingSGD(model.parameters(), lr=args.lr, generator=generator)
    for step in range(1, args.steps + 1):
        x = torch.randn(args.batch_size, 20)
        y = (x @ teacher).argmax(1)
        loss = F.cross_entropy(model(x.bfloat16()), y)
        model.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}")

    mine = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    different = (mine != first).float().mean()
    dist.all_reduce(different, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"evidence: {100 * different.item():.1f} % of the weights differ over ranks")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
