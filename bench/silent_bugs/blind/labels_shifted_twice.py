"""Causal language model with the loss inside forward, on rhythmic character text."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv
TEXT = "the quick brown fox jumps over the lazy dog while the grey cat sleeps. " * 12
CHARS = sorted(set(TEXT))
IDS = torch.tensor([CHARS.index(c) for c in TEXT])


class Windows(Dataset):
    def __init__(self, length=32):
        self.length = length

    def __len__(self):
        return len(IDS) - self.length - 1

    def __getitem__(self, i):
        chunk = IDS[i : i + self.length + 1]
        if FIXED:
            return {"input_ids": chunk[:-1], "labels": chunk[:-1]}
        return {"input_ids": chunk[:-1], "labels": chunk[1:]}


class CausalLM(nn.Module):
    """As in the usual libraries, labels are the input ids: forward moves them by one."""

    def __init__(self, vocab, width=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.02 * torch.randn(64, width))
        layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, vocab)

    def forward(self, input_ids, labels=None):
        t = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        x = self.embed(input_ids) + self.position[:t]
        logits = self.lm_head(self.encoder(x, mask=mask, is_causal=True))
        if labels is None:
            return None, logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss, logits


def main():
    torch.manual_seed(0)
    loader = DataLoader(Windows(), batch_size=16, shuffle=True)
    model = CausalLM(len(CHARS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    while step < 90:
        for batch in loader:
            loss, _ = model(**batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step == 90:
                break
    model.eval()
    with torch.no_grad():
        _, logits = model(IDS[None, :40])
    hits = (logits[0, 10:-1].argmax(-1) == IDS[11:40]).float().mean().item()
    print(f"evidence: accuracy for the next character {hits:.3f}")


if __name__ == "__main__":
    main()
