"""Mixed-precision training of a recurrent language model with gradient clipping."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
MAX_NORM = 1.0


class CharLSTM(nn.Module):
    def __init__(self, vocab, dim=32, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.forget = nn.Linear(dim + hidden, hidden)
        self.cand = nn.Linear(dim + hidden, hidden)
        self.head = nn.Linear(hidden, vocab)
        self.hidden = hidden

    def forward(self, ids):
        x = self.embed(ids)
        h = x.new_zeros(len(ids), self.hidden)
        logits = []
        for t in range(ids.shape[1]):
            both = torch.cat([x[:, t], h], dim=1)
            gate = torch.sigmoid(self.forget(both)).float()
            h = gate * h + (1 - gate) * torch.tanh(self.cand(both)).float()
            logits.append(self.head(h))
        return torch.stack(logits, dim=1)


def corpus():
    text = (
        "the gradient of the loss is scaled before the backward pass and the step undoes it. " * 40
    )
    chars = sorted(set(text))
    return torch.tensor([chars.index(c) for c in text]), len(chars)


def main():
    torch.manual_seed(33)
    data, vocab = corpus()
    model = CharLSTM(vocab)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)
    gen = torch.Generator().manual_seed(0)

    sizes = []
    for step in range(1, 71):
        starts = torch.randint(0, len(data) - 21, (24,), generator=gen).tolist()
        batch = torch.stack([data[s : s + 21] for s in starts])
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if FIXED:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        sizes.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")

    mean = sum(sizes) / len(sizes)
    print(f"evidence: mean norm of the gradient that was applied {mean:.6f}")


if __name__ == "__main__":
    main()
