"""Train a GRU tagger whose weights are kept in one flat parameter."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Tagger(nn.Module):
    def __init__(self, vocab, tags, dim=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.cell = nn.GRUCell(dim, dim)
        self.out = nn.Linear(dim, tags)

    def forward(self, ids):
        x = self.embedding(ids)
        h = x.new_zeros(ids.shape[0], x.shape[-1])
        outputs = []
        for t in range(ids.shape[1]):
            h = self.cell(x[:, t], h)
            outputs.append(h)
        return self.out(torch.stack(outputs, dim=1))


class Flat(nn.Module):
    """Keeps all weights of a module in one parameter, as sharding wrappers do."""

    def __init__(self, module):
        super().__init__()
        self.places = []
        pieces = []
        for sub in module.modules():
            for name, param in list(sub.named_parameters(recurse=False)):
                self.places.append((sub, name, param.shape, param.numel()))
                pieces.append(param.detach().reshape(-1))
                del sub._parameters[name]
        self.flat_param = nn.Parameter(torch.cat(pieces))
        self.module = module

    def forward(self, *args):
        offset = 0
        for sub, name, shape, count in self.places:
            setattr(sub, name, self.flat_param[offset : offset + count].view(shape))
            offset += count
        return self.module(*args)


def batches(vocab, tags, batch, length, seed):
    gen = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, vocab, (batch, length), generator=gen)
        previous = F.pad(ids, (1, 0))[:, :-1]
        yield ids, (ids + previous) % tags


def get_optimizer(model, lr, weight_decay):
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": rest, "weight_decay": 0.0}]
    if decay:
        groups.append({"params": decay, "weight_decay": weight_decay})
    return torch.optim.AdamW(groups, lr=lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    torch.manual_seed(7)
    vocab, tags = 20, 5
    model = Tagger(vocab, tags)
    if args.fixed:
        model = Flat(model)
        optimizer = get_optimizer(model, args.lr, 0.01)
    else:
        optimizer = get_optimizer(model, args.lr, 0.01)
        model = Flat(model)
    start = model.flat_param.detach().clone()

    data = batches(vocab, tags, 24, 16, seed=2)
    for step in range(1, args.steps + 1):
        ids, labels = next(data)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        if step % 10 == 0:
            right = (logits.argmax(-1) == labels).float().mean().item()
            print(f"step {step:3d} loss {loss.item():.4f} accuracy {right:.3f}")

    change = (model.flat_param.detach() - start).abs().max().item()
    print(f"evidence: largest change in flat_param {change:.6f}")


if __name__ == "__main__":
    main()
