"""CTC: an unaligned sequence task; inputs and targets have lengths of their own."""

import torch
from torch import nn
from torch.nn import functional as F

SYMBOLS, BLANK, FEATURES = 5, 0, 8


def utterance(codes):
    length = int(torch.randint(2, 6, ()))
    symbols = torch.randint(1, SYMBOLS + 1, (length,))
    frames = []
    for symbol in symbols.tolist():
        frames += [codes[symbol]] * int(torch.randint(2, 5, ())) + [codes[0]]
    frames = torch.stack(frames)
    return frames + 0.2 * torch.randn_like(frames), symbols


def batch(codes, n=32):
    pairs = [utterance(codes) for _ in range(n)]
    x = nn.utils.rnn.pad_sequence([frames for frames, _ in pairs], batch_first=True)
    x_lengths = torch.tensor([len(frames) for frames, _ in pairs])
    targets = torch.cat([symbols for _, symbols in pairs])
    y_lengths = torch.tensor([len(symbols) for _, symbols in pairs])
    return x, x_lengths, targets, y_lengths


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(FEATURES, 32, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, SYMBOLS + 1)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return F.log_softmax(self.out(hidden), dim=-1)


def decode(log_probs, length):
    best = log_probs[:length].argmax(-1)
    best = torch.unique_consecutive(best)
    return best[best != BLANK].tolist()


def main():
    torch.manual_seed(0)
    codes = torch.randn(SYMBOLS + 1, FEATURES)
    model = Recognizer()
    criterion = nn.CTCLoss(blank=BLANK)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 81):
        x, x_lengths, targets, y_lengths = batch(codes)
        log_probs = model(x, x_lengths)
        loss = criterion(log_probs.transpose(0, 1), targets, x_lengths, y_lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.eval()
    x, x_lengths, targets, y_lengths = batch(codes, 100)
    with torch.no_grad():
        log_probs = model(x, x_lengths)
    goals = [part.tolist() for part in targets.split(y_lengths.tolist())]
    right = sum(
        decode(p, n) == goal for p, n, goal in zip(log_probs, x_lengths, goals, strict=True)
    )
    print(f"sequences right {right / 100:.2f}")


if __name__ == "__main__":
    main()
