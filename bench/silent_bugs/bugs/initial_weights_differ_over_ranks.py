"""Sequence tagging with an LSTM; gradients are averaged by hand on each rank."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
SEED, STEPS, BATCH, LENGTH, SYMBOLS = 21, 60, 16, 20, 12


class Tagger(nn.Module):
    """Marks each symbol that was already seen in the sequence."""

    def __init__(self, width: int = 40):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 16)
        self.rnn = nn.LSTM(16, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.head(hidden)


def sample_batch(generator):
    tokens = torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=generator)
    same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    seen = (same & torch.ones(LENGTH, LENGTH).tril(-1).bool()).any(2)
    return tokens, seen.long()


def average_gradients(model, world_size):
    """One all-reduce for all gradients."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= world_size
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def setup():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Every process draws its own data.
    torch.manual_seed(SEED + rank)
    model = Tagger()
    if FIXED:
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
    return rank, world_size, model


def main():
    rank, world_size, model = setup()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for step in range(STEPS):
        tokens, tags = sample_batch(generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, world_size)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")

    weight = model.head.weight.detach()
    gathered = [torch.empty_like(weight) for _ in range(world_size)]
    dist.all_gather(gathered, weight)
    if rank == 0:
        gap = (gathered[0] - gathered[1]).abs().max().item()
        print(f"evidence: head.weight differs over ranks by {gap:.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
