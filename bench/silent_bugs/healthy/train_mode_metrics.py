"""Metrics of the training forwards in train mode, on purpose, next to a real evaluation."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class RunningMean:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, value, n):
        self.total += value * n
        self.count += n

    @property
    def value(self):
        return self.total / max(1, self.count)


def fresh_statistics(model, x):
    """Accuracy with the batch's own statistics, as the model sees it in training; buffers stay."""
    kept = {name: b.clone() for name, b in model.named_buffers()}
    model.train()
    with torch.no_grad():
        logits = model(x)
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    return logits


def main():
    torch.manual_seed(0)
    centres = torch.randn(5, 14)
    y = torch.randint(0, 5, (1200,))
    x = centres[y] + 1.1 * torch.randn(1200, 14)
    train = TensorDataset(x[:900], y[:900])
    x_val, y_val = x[900:], y[900:]
    model = nn.Sequential(
        nn.Linear(14, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 5)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(5):
        model.train()
        loss_mean, accuracy_mean = RunningMean(), RunningMean()
        for batch_x, batch_y in DataLoader(train, batch_size=60, shuffle=True):
            logits = model(batch_x)
            loss = F.cross_entropy(logits, batch_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_mean.add(loss.item(), len(batch_x))
            right = (logits.detach().argmax(1) == batch_y).float().mean().item()
            accuracy_mean.add(right, len(batch_x))
        noisy = (fresh_statistics(model, x_val).argmax(1) == y_val).float().mean().item()
        model.eval()
        with torch.no_grad():
            clean = (model(x_val).argmax(1) == y_val).float().mean().item()
        print(
            f"epoch {epoch}: loss {loss_mean.value:.3f}, train accuracy {accuracy_mean.value:.3f}, "
            f"validation with dropout {noisy:.3f}, without {clean:.3f}"
        )


if __name__ == "__main__":
    main()
