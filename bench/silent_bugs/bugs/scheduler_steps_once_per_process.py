"""Fine-tuning script with Accelerate on two processes: linear warm-up and decay."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=4)
    parser.add_argument("--per_device_batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--num_warmup_steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--fixed", action="store_true")
    return parser.parse_args()


def linear_schedule(optimizer, num_warmup_steps, num_training_steps):
    def factor(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / (num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor)


class BagOfWords(nn.Module):
    def __init__(self, vocabulary=200, width=32, classes=4):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocabulary, width)
        self.dense = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.classifier(torch.relu(self.dense(self.embedding(tokens))))


def make_dataset(n=512, length=15):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (n,), generator=generator)
    topic = torch.randint(0, 50, (n, length), generator=generator) + labels[:, None] * 50
    other = torch.randint(0, 200, (n, length), generator=generator)
    keep = torch.rand(n, length, generator=generator) < 0.35
    return TensorDataset(torch.where(keep, topic, other), labels)


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    loader = DataLoader(make_dataset(), batch_size=args.per_device_batch_size, shuffle=True)
    model = BagOfWords()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    max_train_steps = args.num_train_epochs * len(loader)
    scale = accelerator.num_processes if args.fixed else 1
    scheduler = accelerator.prepare(
        linear_schedule(optimizer, args.num_warmup_steps * scale, max_train_steps * scale)
    )

    step, rates = 0, []
    for _ in range(args.num_train_epochs):
        model.train()
        for tokens, labels in loader:
            loss = F.cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            rates.append(scheduler.get_last_lr()[0])
            if step % 8 == 0:
                accelerator.print(f"step {step}/{max_train_steps} loss {loss.item():.4f}")

    idle = sum(rate == 0.0 for rate in rates)
    accelerator.print(f"evidence: lr was 0 after {idle} of {step} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
