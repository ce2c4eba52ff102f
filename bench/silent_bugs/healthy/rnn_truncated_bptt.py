"""A character-level LSTM with truncated BPTT: the state goes from chunk to chunk, detached."""

import torch
from torch import nn
from torch.nn import functional as F

TEXT = (
    "the quick brown fox jumps over the lazy dog while the slow green turtle sleeps under "
    "the old oak tree and the small grey mouse runs along the wall of the quiet house "
) * 30


class CharLSTM(nn.Module):
    def __init__(self, vocab, width=64):
        super().__init__()
        self.embedding = nn.Embedding(vocab, 24)
        self.lstm = nn.LSTM(24, width, batch_first=True)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, ids, state=None):
        out, state = self.lstm(self.embedding(ids), state)
        return self.decoder(out), state


def batchify(ids, rows):
    length = (len(ids) - 1) // rows
    x = ids[: rows * length].view(rows, length)
    y = ids[1 : rows * length + 1].view(rows, length)
    return x, y


def chunks(x, y, length):
    for start in range(0, x.size(1) - length + 1, length):
        yield x[:, start : start + length], y[:, start : start + length]


def main():
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    ids = torch.tensor([letters.index(c) for c in TEXT])
    x, y = batchify(ids, rows=8)
    model = CharLSTM(len(letters))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    step = 0
    for epoch in range(4):
        state = None
        for inputs, targets in chunks(x, y, length=25):
            if state is not None:
                state = tuple(part.detach() for part in state)
            logits, state = model(inputs, state)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        ids, state, text = torch.tensor([[letters.index("t")]]), None, "t"
        for _ in range(60):
            logits, state = model(ids, state)
            ids = logits[:, -1].argmax(-1, keepdim=True)
            text += letters[ids.item()]
    print(text)


if __name__ == "__main__":
    main()
