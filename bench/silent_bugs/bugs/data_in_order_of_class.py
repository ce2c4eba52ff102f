"""CNN on small pictures stored class by class, as an image folder lists them."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

FIXED = "--fixed" in sys.argv
CLASSES = ("blank", "bar", "box", "cross", "dot", "frame")


def draw(name: str, generator: torch.Generator) -> torch.Tensor:
    image = torch.zeros(10, 10)
    r, c = torch.randint(2, 7, (2,), generator=generator).tolist()
    if name == "bar":
        image[r, 1:9] = 1
    elif name == "box":
        image[r - 1 : r + 2, c - 1 : c + 2] = 1
    elif name == "cross":
        image[r, c - 2 : c + 3] = 1
        image[r - 2 : r + 3, c] = 1
    elif name == "dot":
        image[r, c] = 2
    elif name == "frame":
        image[[0, -1]] = 1
        image[:, [0, -1]] = 1
    return image + 0.3 * torch.randn(10, 10, generator=generator)


class PictureFolder(Dataset):
    """Samples are listed folder by folder."""

    def __init__(self, per_class: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.samples = [
            (draw(name, generator).unsqueeze(0), label)
            for label, name in enumerate(CLASSES)
            for _ in range(per_class)
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc = nn.Linear(24 * 4, len(CLASSES))

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.adaptive_max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    hits = sum((net(x).argmax(1) == y).sum().item() for x, y in loader)
    net.train()
    return hits / len(loader.dataset)


def main():
    torch.manual_seed(6)
    train_loader = DataLoader(PictureFolder(80, seed=0), batch_size=32, shuffle=FIXED)
    test_set = PictureFolder(30, seed=1)
    test_loader = DataLoader(Subset(test_set, range(len(test_set))), batch_size=60)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.3)
    kinds = []
    for epoch in range(6):
        for i, (x, y) in enumerate(train_loader):
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kinds.append(len(y.unique()))
            if i % 5 == 0:
                print(f"epoch {epoch} batch {i:2d} loss {loss.item():.4f}")
        schedule.step()
        print(f"epoch {epoch} test accuracy {accuracy(net, test_loader):.3f}")
    print(f"evidence: {sum(kinds) / len(kinds):.2f} classes per batch of {len(CLASSES)}")


if __name__ == "__main__":
    main()
