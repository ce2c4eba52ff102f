"""Accelerate: prepared objects, accumulation, clipping when gradients are synced."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class TabularNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 4) for size in (5, 9, 3))
        self.mlp = nn.Sequential(nn.Linear(4 * 3 + 6, 48), nn.SiLU(), nn.Linear(48, 1))

    def forward(self, categories, numbers):
        parts = [e(categories[:, i]) for i, e in enumerate(self.embeddings)]
        return self.mlp(torch.cat([*parts, numbers], dim=1)).squeeze(1)


def table(n):
    categories = torch.stack([torch.randint(0, size, (n,)) for size in (5, 9, 3)], dim=1)
    numbers = torch.randn(n, 6)
    score = categories[:, 0] - categories[:, 1] / 2 + 2 * numbers[:, 0] * (categories[:, 2] - 1)
    return TensorDataset(categories, numbers, (score > 0).float())


def main():
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    train = DataLoader(table(1920), batch_size=32, shuffle=True)
    val = DataLoader(table(400), batch_size=100)
    model = TabularNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=90)
    model, optimizer, train, val, schedule = accelerator.prepare(
        model, optimizer, train, val, schedule
    )
    for epoch in range(3):
        model.train()
        for step, (categories, numbers, label) in enumerate(train):
            with accelerator.accumulate(model):
                loss = F.binary_cross_entropy_with_logits(model(categories, numbers), label)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step % 15 == 0:
                accelerator.print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        model.eval()
        right = []
        for categories, numbers, label in val:
            with torch.no_grad():
                guess = (model(categories, numbers) > 0).float()
            right.append(accelerator.gather_for_metrics(guess == label))
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(right).float().mean():.3f}")


if __name__ == "__main__":
    main()
