"""Sentence classifier: nn.TransformerEncoder over padded batches."""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv
PAD = 0


class Reviews(Dataset):
    """Words 1 to 9 are good, 10 to 18 are bad, the others say nothing."""

    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        while len(self.rows) < n:
            length = int(torch.randint(4, 30, (1,), generator=generator))
            words = torch.randint(1, 60, (length,), generator=generator)
            good = ((words > 0) & (words < 10)).sum()
            bad = ((words > 9) & (words < 19)).sum()
            if good != bad:
                self.rows.append((words, int(good > bad)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    words, labels = zip(*rows, strict=True)
    tokens = pad_sequence(list(words), batch_first=True, padding_value=PAD)
    return {"tokens": tokens, "mask": tokens.eq(PAD), "labels": torch.tensor(labels)}


class Classifier(nn.Module):
    def __init__(self, vocabulary=60, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(32, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cls = nn.Parameter(torch.zeros(width))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens, mask=None):
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        cls = self.cls.expand(len(x), 1, -1)
        x = torch.cat([cls, x], 1)
        if mask is not None:
            mask = nn.functional.pad(mask, (1, 0), value=False)
        x = self.encoder(x, src_key_padding_mask=mask)
        return self.head(x[:, 0])


def run_model(model, batch):
    if FIXED:
        return model(batch["tokens"], batch["mask"])
    return model(batch["tokens"])


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = sum((run_model(model, b).argmax(1) == b["labels"]).sum().item() for b in loader)
    model.train()
    return hits / len(loader.dataset)


def main():
    torch.manual_seed(4)
    train_loader = DataLoader(Reviews(640, 0), 32, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(Reviews(200, 1), 50, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = 0
    for epoch in range(4):
        for batch in train_loader:
            loss = nn.functional.cross_entropy(run_model(model, batch), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}")
        print(f"epoch {epoch} accuracy {evaluate(model, test_loader):.3f}")

    model.eval()
    with torch.no_grad():
        words = torch.arange(3, 11).unsqueeze(0)
        longer = nn.functional.pad(words, (0, 20), value=PAD)
        short, long = (run_model(model, {"tokens": t, "mask": t.eq(PAD)}) for t in (words, longer))
    print(f"evidence: padding changes the logits by {(short - long).abs().max().item():.6f}")


if __name__ == "__main__":
    main()
