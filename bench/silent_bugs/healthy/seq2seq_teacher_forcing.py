"""Sequence to sequence with teacher forcing: the decoder's input is the shifted target."""

import random

import torch
from torch import nn
from torch.nn import functional as F

DIGITS, BOS, EOS, PAD = 10, 10, 11, 12
SIZE = 13


class Seq2Seq(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(SIZE, width, padding_idx=PAD)
        self.position = nn.Embedding(12, width)
        self.transformer = nn.Transformer(width, 4, 1, 1, 96, 0.0, batch_first=True)
        self.transformer.encoder.use_nested_tensor = False
        self.out = nn.Linear(width, SIZE)

    def embed(self, ids):
        return self.embedding(ids) + self.position(torch.arange(ids.size(1)))

    def forward(self, source, target):
        padding = source == PAD
        mask = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_key_padding_mask=target == PAD,
        )
        return self.out(hidden)


def batch(n):
    sources, targets = [], []
    for _ in range(n):
        digits = [random.randrange(DIGITS) for _ in range(random.randint(2, 6))]
        sources.append(torch.tensor(digits))
        targets.append(torch.tensor([BOS, *reversed(digits), EOS]))
    pad = nn.utils.rnn.pad_sequence
    return pad(sources, True, PAD), pad(targets, True, PAD)


@torch.no_grad()
def exact_matches(model, n=60):
    model.eval()
    source, target = batch(n)
    out = torch.full((n, 1), BOS)
    for _ in range(target.size(1) - 1):
        following = model(source, out)[:, -1].argmax(-1)
        done = (out == EOS).any(1)
        out = torch.cat([out, torch.where(done, PAD, following)[:, None]], dim=1)
    model.train()
    return (out == target).all(1).float().mean().item()


def main():
    random.seed(0)
    torch.manual_seed(0)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    for step in range(1, 121):
        source, target = batch(64)
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"exact matches {exact_matches(model):.2f}")


if __name__ == "__main__":
    main()
