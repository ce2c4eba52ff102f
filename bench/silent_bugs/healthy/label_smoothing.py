"""Label smoothing: the training loss cannot reach zero; the evaluation uses none."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU()
        )
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.body(x))


def clusters(n, centres):
    y = torch.randint(0, len(centres), (n,))
    return TensorDataset(centres[y] + 0.4 * torch.randn(n, 8), y)


def main():
    torch.manual_seed(0)
    centres = 2 * torch.randn(10, 8)
    train, test = clusters(1000, centres), clusters(400, centres)
    model = Classifier(10)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)
    step = 0
    for epoch in range(6):
        model.train()
        for x, y in DataLoader(train, batch_size=64, shuffle=True):
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 8 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
        model.eval()
        with torch.no_grad():
            x, y = test.tensors
            logits = model(x)
            accuracy = (logits.argmax(1) == y).float().mean().item()
            print(f"epoch {epoch}: test {F.cross_entropy(logits, y):.3f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
