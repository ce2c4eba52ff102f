"""Text classifier, validated in the middle of an epoch."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
VAL_STEP = 10


class TextCNN(nn.Module):
    def __init__(self, vocab=50, dim=24, classes=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 16, k, padding=k // 2) for k in (3, 5))
        self.bn = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(32, classes)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        x = torch.cat([F.relu(conv(x)).amax(dim=-1) for conv in self.convs], dim=1)
        return self.fc(self.dropout(self.bn(x)))


def reviews(count, seed):
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=gen)
    ids = torch.randint(0, 50, (count, 20), generator=gen)
    place = torch.randint(0, 18, (count,), generator=gen)
    for row, (label, start) in enumerate(zip(labels.tolist(), place.tolist(), strict=True)):
        ids[row, start] = 10 + label
        ids[row, start + 1] = 20 + label
    return TensorDataset(ids, labels)


def validate(model, loader):
    model.eval()
    hits = 0
    with torch.no_grad():
        for ids, labels in loader:
            hits += (model(ids).argmax(1) == labels).sum().item()
    if FIXED:
        model.train()
    return hits / len(loader.dataset)


def train_epoch(model, loader, valid_loader, optimizer, state):
    model.train()
    for ids, labels in loader:
        state["training_mode"] += model.training
        loss = F.cross_entropy(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        if state["step"] % VAL_STEP == 0:
            accuracy = validate(model, valid_loader)
            print(f"step {state['step']} loss {loss.item():.4f} accuracy {accuracy:.3f}")


def main():
    torch.manual_seed(81)
    train_loader = DataLoader(reviews(960, 0), batch_size=32, shuffle=True)
    valid_loader = DataLoader(reviews(192, 1), batch_size=64)
    model = TextCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    state = {"step": 0, "training_mode": 0}
    for _epoch in range(3):
        train_epoch(model, train_loader, valid_loader, optimizer, state)
    print(f"evidence: {state['training_mode']} of {state['step']} steps in training mode")


if __name__ == "__main__":
    main()
