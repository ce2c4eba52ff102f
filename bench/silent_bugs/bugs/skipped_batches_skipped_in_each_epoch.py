"""Text classification with Accelerate, resumed in the middle of an epoch."""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoint_step", type=int, default=12)
ARGS = parser.parse_args()


class Sentences(Dataset):
    """Bracket strings; the label says whether the string is balanced."""

    def __init__(self, n=480, length=14):
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, 2, (n, length), generator=generator)
        depth = (1 - 2 * self.tokens).cumsum(1)
        self.labels = (depth.amin(1) >= -1).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.tokens[i], self.labels[i], i


class Classifier(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(2, 8)
        self.rnn = nn.GRU(8, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0][:, -1])


def build(accelerator):
    set_seed(30)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    loader = DataLoader(Sentences(), batch_size=20, shuffle=True)
    return accelerator.prepare(model, optimizer, loader)


def train_step(accelerator, model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def first_run(folder):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = build(accelerator)
    for step, batch in enumerate(loader, start=1):
        loss = train_step(accelerator, model, optimizer, batch)
        if step == ARGS.checkpoint_step:
            accelerator.save_state(folder)
            print(f"step {step} loss {loss:.4f}, interrupted")
            break


def resumed_run(folder):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = build(accelerator)
    accelerator.load_state(folder)
    step = ARGS.checkpoint_step
    seen = []
    for epoch in range(ARGS.epochs):
        model.train()
        active = loader
        if epoch == 0 or not ARGS.fixed:
            active = skip_first_batches(loader, ARGS.checkpoint_step)
        rows = 0
        for batch in active:
            loss = train_step(accelerator, model, optimizer, batch)
            rows += len(batch[2])
            step += 1
            if step % 8 == 0:
                print(f"epoch {epoch} step {step} loss {loss:.4f}")
        seen.append(rows)
    return seen, len(loader.dataset)


def main():
    with tempfile.TemporaryDirectory() as folder:
        first_run(folder)
        seen, total = resumed_run(folder)
    share = sum(seen[1:]) / (total * (len(seen) - 1))
    print(f"evidence: full epochs after resuming read {100 * share:.1f} % of the data")


if __name__ == "__main__":
    main()
