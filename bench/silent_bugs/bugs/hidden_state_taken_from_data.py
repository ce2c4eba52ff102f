"""Sequence-to-sequence reversal with two GRUs."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
VOCAB, DIM, LENGTH = 12, 48, 6
BOS = 0


def repackage(hidden):
    """The state with which a sequence starts."""
    if isinstance(hidden, tuple):
        return tuple(repackage(h) for h in hidden)
    return hidden.data


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, ids):
        _, hidden = self.gru(self.embed(ids))
        return hidden


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids, hidden):
        output, hidden = self.gru(self.embed(ids), hidden)
        return self.out(output), hidden


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, source, target_in):
        hidden = self.encoder(source)
        if not FIXED:
            hidden = repackage(hidden)
        logits, _ = self.decoder(target_in, hidden)
        return logits


def make_batch(size):
    source = torch.randint(1, VOCAB, (size, LENGTH))
    target = source.flip(1)
    target_in = torch.cat([torch.full((size, 1), BOS), target[:, :-1]], dim=1)
    return source, target_in, target


def main():
    torch.manual_seed(61)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(
        [
            {"params": model.encoder.parameters(), "lr": 4e-3},
            {"params": model.decoder.parameters(), "lr": 4e-3},
        ]
    )
    start = {n: p.detach().clone() for n, p in model.encoder.named_parameters()}
    valid = make_batch(64)

    for step in range(1, 101):
        source, target_in, target = make_batch(48)
        loss = F.cross_entropy(model(source, target_in).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        if step % 20 == 0:
            with torch.no_grad():
                logits = model(valid[0], valid[1])
                right = (logits.argmax(-1) == valid[2]).float().mean().item()
            print(f"step {step} loss {loss.item():.4f} accuracy {right:.3f}")

    moved = max((p.detach() - start[n]).abs().max() for n, p in model.encoder.named_parameters())
    print(f"evidence: largest change of the encoder {moved.item():.6f}")


if __name__ == "__main__":
    main()
