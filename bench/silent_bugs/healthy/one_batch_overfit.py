"""The usual first test of a new model: overfit one batch until the loss is almost zero."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    def __init__(self, n=200):
        self.images = torch.randn(n, 3, 8, 8)
        self.labels = torch.randint(0, 10, (n,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 32)
        self.fc = nn.Linear(32 * 16, 10)

    def forward(self, image):
        x = torch.relu(self.norm1(self.conv1(image)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.fc(x.flatten(1))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Blobs(), batch_size=16, shuffle=True)
    batch = next(iter(loader))
    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(60):
        logits = model(batch["image"])
        loss = criterion(logits, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            accuracy = (logits.argmax(1) == batch["label"]).float().mean().item()
            print(f"step {step}: loss {loss.item():.5f}, accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
