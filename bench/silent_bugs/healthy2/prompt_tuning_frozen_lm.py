"""Prompt tuning: a frozen language model, in evaluation mode on purpose, and a few trained vectors.

The gradient has to flow through the frozen layers, though none of their weights gets any.
"""

import torch
import torch.nn.functional as F
from torch import nn

TOPICS, WORDS, WIDTH, PROMPT, LENGTH = 8, 4, 32, 3, 4
VOCAB = TOPICS * WORDS


class SmallLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, inputs):
        return self.head(self.dropout(self.rnn(inputs)[0]))


def texts(topic):
    return topic[:, None] * WORDS + torch.randint(WORDS, (len(topic), LENGTH))


def pretrain(model, steps=30):
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(steps):
        tokens = texts(torch.randint(TOPICS, (64,)))
        logits = model(model.embed(tokens[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"language model loss {loss.item():.4f}")


def main():
    torch.manual_seed(0)
    model = SmallLM()
    pretrain(model)
    model.eval().requires_grad_(False)
    prompt = nn.Parameter(model.embed.weight.mean(0).repeat(PROMPT, 1))
    optimizer = torch.optim.Adam([prompt], lr=0.1)
    for step in range(30):
        tokens = texts(torch.full((32,), 5))
        inputs = torch.cat([prompt.expand(32, -1, -1), model.embed(tokens[:, :-1])], dim=1)
        logits = model(inputs)[:, PROMPT - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
