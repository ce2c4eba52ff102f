"""Continue a pretrained GRU language model whose output layer shares the embedding."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
TEXT = "a small cat sat on a tall wall and saw a small bat and a fat rat run past a hat. " * 30
CHARS = sorted(set(TEXT))
DATA = torch.tensor([CHARS.index(c) for c in TEXT])


class GRULanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int = 48):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.tie_weights()

    def tie_weights(self):
        self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        hidden, _ = self.gru(self.embedding(ids))
        return self.decoder(hidden)


def get_batch(generator, size=16, length=24):
    start = torch.randint(0, len(DATA) - length - 1, (size,), generator=generator).tolist()
    rows = torch.stack([DATA[s : s + length + 1] for s in start])
    return rows[:, :-1], rows[:, 1:]


def train(model, steps, lr, generator, name):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(1, steps + 1):
        x, y = get_batch(generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"{name} step {step} loss {loss.item():.4f}")


def save(model, path):
    """One contiguous half-precision tensor per name, as on the hub."""
    torch.save({k: v.detach().half().clone() for k, v in model.state_dict().items()}, path)


def load(path) -> GRULanguageModel:
    with torch.device("meta"):
        model = GRULanguageModel(len(CHARS))
    state = {k: v.float() for k, v in torch.load(path).items()}
    model.load_state_dict(state, assign=True)
    if FIXED:
        model.tie_weights()
    return model


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pretrained.pt"
        model = GRULanguageModel(len(CHARS))
        train(model, 40, 5e-3, generator, "pretrain")
        save(model, path)
        model = load(path)
    train(model, 50, 2e-3, generator, "finetune")
    gap = (model.embedding.weight - model.decoder.weight).abs().max().item()
    print(f"evidence: embedding and decoder weights differ by {gap:.6f}")


if __name__ == "__main__":
    main()
