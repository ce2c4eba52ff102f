"""Instruction-like tuning: prompts are masked with -100, a few samples are masked completely."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCAB, IGNORE, SEP = 14, -100, 13


class CopyTask(Dataset):
    """prompt, separator, answer (the prompt again); answers that are too long are masked."""

    def __init__(self, n):
        generator = torch.Generator().manual_seed(n)
        self.prompts = [
            torch.randint(1, SEP, (int(torch.randint(2, 7, (), generator=generator)),))
            for _ in range(n)
        ]

    def __len__(self):
        return len(self.prompts)

    def __getitem__(self, index):
        prompt = self.prompts[index]
        ids = torch.cat([prompt, torch.tensor([SEP]), prompt])
        labels = ids.clone()
        labels[: len(prompt) + 1] = IGNORE
        if len(prompt) == 6:  # no answer is wanted for these
            labels[:] = IGNORE
        return ids, labels


def collate(samples):
    ids = nn.utils.rnn.pad_sequence([s[0] for s in samples], batch_first=True, padding_value=0)
    labels = nn.utils.rnn.pad_sequence([s[1] for s in samples], True, IGNORE)
    return ids, labels


class Decoder(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 96, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        length = ids.size(1)
        x = self.embedding(ids) + self.position(torch.arange(length))
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.head(self.layers(x, mask=mask))


def shifted_loss(logits, labels):
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE
    )


def main():
    torch.manual_seed(0)
    loader = DataLoader(CopyTask(1600), batch_size=64, shuffle=True, collate_fn=collate)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    step = 0
    for epoch in range(4):
        for ids, labels in loader:
            loss = shifted_loss(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 10 == 0:
                masked = (labels == IGNORE).all(1).sum().item()
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}, all masked {masked}")


if __name__ == "__main__":
    main()
