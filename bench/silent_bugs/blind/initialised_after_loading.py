"""Fine-tune a pretrained text encoder with a new head."""

import io
import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
VOCAB, WIDTH = 40, 32


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        x = self.norm(self.embedding(ids)).transpose(1, 2)
        return torch.tanh(self.dense(F.relu(self.mix(x)).transpose(1, 2)))


class MaskedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = TextEncoder()
        self.vocabulary = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        hidden = ids.clone()
        hidden[:, ::4] = 0
        logits = self.vocabulary(self.encoder(hidden))[:, ::4]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, ::4].flatten())


class SentenceClassifier(nn.Module):
    def __init__(self, file):
        super().__init__()
        self.encoder = TextEncoder()
        self.head = nn.Linear(WIDTH, 2)
        self.encoder.load_state_dict(torch.load(file))
        (self.head if FIXED else self).apply(self.initialise)

    @staticmethod
    def initialise(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids):
        return self.head(self.encoder(ids).mean(1))


def sentences(n):
    start = torch.randint(1, VOCAB, (n, 1))
    step = torch.randint(1, 3, (n, 1))
    return 1 + (start + step * torch.arange(16)) % (VOCAB - 1), (step - 1).squeeze(1)


def main():
    torch.manual_seed(0)
    pretraining = MaskedModel()
    optimizer = torch.optim.AdamW(pretraining.parameters(), lr=5e-3)
    for _ in range(60):
        loss = pretraining(sentences(32)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"pretraining loss {loss.item():.4f}")
    file = io.BytesIO()
    torch.save(pretraining.encoder.state_dict(), file)
    file.seek(0)
    model = SentenceClassifier(file)
    old = pretraining.encoder.embedding.weight
    gap = (model.encoder.embedding.weight - old).abs().max().item()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.encoder.parameters(), "lr": 2e-4},
            {"params": model.head.parameters(), "lr": 2e-2},
        ]
    )
    for step in range(1, 61):
        ids, labels = sentences(32)
        loss = F.cross_entropy(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"evidence: embedding at the start of fine-tuning is {gap:.4f} from the pretrained one")


if __name__ == "__main__":
    main()
