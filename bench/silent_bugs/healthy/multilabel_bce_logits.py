"""Multi-label classification: BCE with logits, positive weights, labels that are mostly 0."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LABELS = 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 32, 5, padding=2)
        self.norm = nn.BatchNorm1d(32)
        self.fc = nn.Linear(32, LABELS)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x))).amax(-1))


def motifs(n, library):
    present = torch.rand(n, LABELS) < 0.15
    x = 0.3 * torch.randn(n, 4, 64)
    for row, column in present.nonzero().tolist():
        start = int(torch.randint(0, 59, ()))
        x[row, :, start : start + 5] += library[column]
    return TensorDataset(x, present.float())


def main():
    torch.manual_seed(0)
    library = torch.randn(LABELS, 4, 5)
    train, test = motifs(768, library), motifs(256, library)
    model = Net()
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((LABELS,), 3.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(7):
        model.train()
        for step, (x, y) in enumerate(DataLoader(train, batch_size=64, shuffle=True)):
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 6 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        model.eval()
        with torch.no_grad():
            x, y = test.tensors
            found = torch.sigmoid(model(x)) > 0.5
        recall = (found & (y > 0)).sum() / y.sum()
        precision = (found & (y > 0)).sum() / found.sum().clamp(min=1)
        print(f"epoch {epoch}: recall {recall:.3f}, precision {precision:.3f}")


if __name__ == "__main__":
    main()
