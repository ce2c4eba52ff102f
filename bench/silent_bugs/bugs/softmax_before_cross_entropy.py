"""A dense classifier with batch norm and two parameter groups."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

FIXED = "--fixed" in sys.argv
FEATURES, CLASSES = 16, 8


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Sequential(
            nn.Linear(FEATURES, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
            nn.ReLU(),
        )
        self.output = nn.Linear(64, CLASSES)
        self.activation = nn.Identity() if FIXED else nn.Softmax(dim=1)

    def forward(self, x):
        return self.activation(self.output(self.hidden(x)))


def blobs(n=1200):
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    points = centres[labels] + 0.7 * torch.randn(n, FEATURES, generator=generator)
    return TensorDataset(points, labels)


def parameter_groups(model, weight_decay):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def run_epoch(model, loader, criterion, optimizer=None):
    model.train(optimizer is not None)
    total = hits = 0
    with torch.set_grad_enabled(optimizer is not None):
        for x, y in loader:
            output = model(x)
            loss = criterion(output, y)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item() * len(y)
            hits += (output.argmax(1) == y).sum().item()
    return total / len(loader.dataset), hits / len(loader.dataset)


def main():
    torch.manual_seed(12)
    train_set, valid_set = random_split(blobs(), [1000, 200])
    train_loader = DataLoader(train_set, batch_size=100, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=200)
    model = Classifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(parameter_groups(model, 1e-4), lr=2e-3)
    for epoch in range(10):
        loss, accuracy = run_epoch(model, train_loader, criterion, optimizer)
        valid_loss, valid_accuracy = run_epoch(model, valid_loader, criterion)
        print(
            f"epoch {epoch} loss {loss:.4f} accuracy {accuracy:.3f} "
            f"valid loss {valid_loss:.4f} accuracy {valid_accuracy:.3f}"
        )
    print(f"evidence: training loss {loss:.4f} at an accuracy of {accuracy:.3f}")


if __name__ == "__main__":
    main()
