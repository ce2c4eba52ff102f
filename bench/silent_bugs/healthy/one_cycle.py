"""OneCycleLR: lr and momentum change in each step, lr ends near zero."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class ResBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        nn.init.zeros_(self.bn2.weight)  # each block starts as the identity

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        ResBlock(12),
        nn.MaxPool2d(2),
        ResBlock(12),
        nn.Flatten(),
        nn.Linear(12 * 16, 6),
    )


def images(n, prototypes):
    y = torch.randint(0, 6, (n,))
    return TensorDataset(prototypes[y] + 1.3 * torch.randn(n, 1, 8, 8), y)


def main(epochs=5):
    torch.manual_seed(0)
    prototypes = torch.randn(6, 1, 8, 8)
    loader = DataLoader(images(960, prototypes), batch_size=64, shuffle=True)
    x_test, y_test = images(300, prototypes).tensors
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, epochs=epochs, steps_per_epoch=len(loader)
    )
    for epoch in range(epochs):
        model.train()
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 7 == 0:
                group = optimizer.param_groups[0]
                print(f"loss {loss.item():.3f}, lr {group['lr']:.4f}, mom {group['momentum']:.3f}")
        model.eval()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
