"""A causal language model with left padding: padding is masked in attention and in the loss."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

PAD, EOS, VOCAB, WIDTH = 0, 1, 18, 48


def collate(samples):
    longest = max(len(s) for s in samples)
    ids = torch.full((len(samples), longest), PAD)
    for row, sample in zip(ids, samples, strict=True):
        row[longest - len(sample) :] = sample
    mask = ids != PAD  # the end token has an id of its own
    labels = ids.masked_fill(~mask, -100)
    labels[mask.cumsum(1) == 1] = -100  # nothing precedes the first token
    return {"ids": ids, "mask": mask, "labels": labels}


class LeftPaddedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(20, WIDTH)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH)
            )
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, mask):
        length = ids.size(1)
        places = (mask.cumsum(1) - 1).clamp(min=0)  # positions count from the first real token
        x = self.embedding(ids) + self.position(places)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None] | ~mask[:, None, :]
        hidden = hidden & ~torch.eye(length, dtype=torch.bool)  # a padded row may see itself
        hidden = hidden.repeat_interleave(4, dim=0)
        for norm, attention, mlp in zip(self.norms, self.attention, self.mlps, strict=True):
            y = norm(x)
            x = x + attention(y, y, y, attn_mask=hidden, need_weights=False)[0]
            x = x + mlp(x)
        return self.head(x)


def counting(n):
    samples = []
    for _ in range(n):
        length, start = int(torch.randint(4, 12, ())), int(torch.randint(2, 8, ()))
        samples.append(torch.tensor([*range(start, min(start + length, VOCAB)), EOS]))
    return samples


def loss_of(model, batch):
    logits = model(batch["ids"], batch["mask"])
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


def main():
    torch.manual_seed(0)
    loader = DataLoader(counting(1200), batch_size=48, shuffle=True, collate_fn=collate)
    model = LeftPaddedLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = 0
    for epoch in range(3):
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        print(f"test loss {loss_of(model, collate(counting(200))).item():.3f}")


if __name__ == "__main__":
    main()
