"""A masked language model: attention in both directions, loss at masked positions only."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, MASK, WIDTH, LENGTH = 12, 12, 48, 14


class BertLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB + 1, WIDTH)
        self.position = nn.Parameter(0.3 * torch.randn(1, LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 96, 0.05, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids) + self.position))


def sentences(n):
    start, stride = torch.randint(0, VOCAB, (n, 1)), torch.randint(1, 3, (n, 1))
    return (start + stride * torch.arange(LENGTH)) % VOCAB


def corrupt(ids, rate=0.2):
    chosen = torch.rand(ids.shape) < rate
    chosen[:, 0] |= ~chosen.any(1)
    labels = ids.masked_fill(~chosen, -100)
    action = torch.rand(ids.shape)
    noisy = torch.where(chosen & (action < 0.8), MASK, ids)
    noisy = torch.where(chosen & (action > 0.9), torch.randint_like(ids, VOCAB), noisy)
    return noisy, labels


def main():
    torch.manual_seed(0)
    model = BertLike()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    for step in range(1, 121):
        noisy, labels = corrupt(sentences(64))
        loss = F.cross_entropy(model(noisy).transpose(1, 2), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.eval()
    noisy, labels = corrupt(sentences(200))
    with torch.no_grad():
        right = model(noisy).argmax(-1) == labels
    print(f"accuracy at masked positions {right[labels != -100].float().mean():.3f}")


if __name__ == "__main__":
    main()
